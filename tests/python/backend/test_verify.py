"""``verify``: checksums behind compressed messages, over real sockets that flip a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.cpp_example import CXX, needs_compiler
from support.worlds import run

import zcomm

SHIM = Path(__file__).parents[2] / "support" / "corrupt_socket.cpp"

PROGRAM = """
import sys, torch, torch.distributed as dist, zcomm
rank, call, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
options = zcomm.Options(all_reduce="int8:128", exchanges="int8:128", min_bytes=0, node_size=1)
dist.init_process_group("zcomm", init_method="file://" + store, rank=rank, world_size=2, pg_options=options)
values = torch.ones(65536)
if call == "all_reduce":
    dist.all_reduce(values)
elif rank == 0:
    dist.send(values, 1)
else:
    dist.recv(values, 0)
print("all equal:", bool((values == values[0]).all()))
"""


def _results() -> list[torch.Tensor]:
    """What all kinds of compressed calls return on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.randn(size * 1000, generator=torch.Generator().manual_seed(rank))
    shard, total = values[:1000].clone(), values.clone()
    gathered, received, moved, sent = (torch.empty_like(values) for _ in range(4))
    dist.all_gather_into_tensor(gathered, shard)
    dist.reduce_scatter_tensor(shard, values)
    dist.all_reduce(total)
    dist.all_to_all_single(received, values)
    moved.copy_(values)
    dist.broadcast(moved, 1)
    if rank == 0:
        dist.send(values, size - 1)
    elif rank == size - 1:
        dist.recv(sent, 0)
    return [gathered, shard, total, received, moved, sent if rank == size - 1 else values]


def test_results_have_the_bits_of_unverified_ones() -> None:
    def made(verify: bool) -> list[list[torch.Tensor]]:
        forms = ("single", "in_place", "out_of_place")
        asked = zcomm.Options(all_reduce="int8:128", exchanges="int8:128", min_bytes=0, forms=forms, verify=verify)
        return run(_results, size=4, nodes=[0, 0, 1, 1], options=asked)

    results = made(True)
    for verified, usual in zip(results, made(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(verified, usual, strict=True))
    exact = sum(torch.randn(4000, generator=torch.Generator().manual_seed(rank)) for rank in range(4))
    assert not torch.equal(results[0][2], torch.as_tensor(exact))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "corrupt.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ldl"]
    subprocess.run([str(CXX), str(SHIM), "-o", str(library), *flags], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize("call", ["all_reduce", "message"])
@pytest.mark.parametrize("verify", ["0", "1"])
def test_a_bit_that_a_socket_flips_is_an_error_instead_of_a_wrong_value(
    call: str, verify: str, shim: Path, tmp_path: Path
) -> None:
    ranks = []
    for rank in range(2):
        preload = {"LD_PRELOAD": str(shim)} if rank == 0 else {}
        command = [sys.executable, "-c", PROGRAM, str(rank), call, str(tmp_path / "store")]
        variables = {**os.environ, "ZCOMM_VERIFY": verify, **preload}
        ranks.append(subprocess.Popen(command, env=variables, stdout=-1, stderr=-1, text=True))
    (_, errors), (shown, found) = (process.communicate(timeout=120) for process in ranks)
    assert "flipped a bit" in errors
    if verify == "0":
        assert shown == "all equal: False\n", found
    else:
        assert shown == ""
        texts = {
            "all_reduce": "corrupted bytes from rank 0: message",
            "message": "Float int8:128: corrupted bytes: they",
        }
        assert texts[call] in found


def test_encryption_that_torch_does_not_have_is_an_error() -> None:
    """Without key files it is one for each torch, which reads the variable once in a process."""
    program = "from zcomm.distributed import backend; backend._devices(None)"
    variables = {**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "RuntimeError" in ended.stderr, ended.stderr
