"""``verify``: checksums behind compressed messages, over sockets and memory that flip a bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cpp_example import CXX, needs_compiler
from support.worlds import run

import zcomm

SHIM = Path(__file__).parents[2] / "support" / "corrupt_bytes.cpp"

# Each case makes new groups, because an error ends a group. Rank 0 plants a fault in the call. For each case and value
# of verify, each rank prints how that call and the next one ended, and its counter.
PROGRAM = """
import ctypes, json, re, sys, torch, torch.distributed as dist, zcomm
from torch.nn.parallel import DistributedDataParallel
from zcomm.distributed.groups import backend_of

rank, store, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
dist.init_process_group("zcomm", init_method="file://" + store, rank=rank, world_size=3)
shim = ctypes.CDLL(None) if rank == 0 else None

def plant(where="socket"):
    if shim is None:
        return
    if where == "socket":
        shim.corrupt_socket()
    else:
        shared = re.findall(r"(\\w+)-(\\w+) .*/memfd:zcomm", open("/proc/self/maps").read())
        assert shared
        for begin, end in shared:
            shim.corrupt_memory(ctypes.c_size_t(int(begin, 16)), ctypes.c_size_t(int(end, 16)))

def ones():
    return torch.ones(3 * 65536)

def same(values):
    return bool((values == values.flatten()[0]).all())

def all_reduce(group):
    plant()
    dist.all_reduce(values := ones(), group=group)
    return same(values)

def work(group):
    plant()
    dist.all_reduce(values := ones(), group=group, async_op=True).wait()
    return same(values)

def future(group):
    plant()
    return same(dist.all_reduce(ones(), group=group, async_op=True).get_future().wait()[0])

def backward(group):
    model = torch.nn.Linear(3 * 65536, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
    plant()
    ddp(ones()).backward()  # torch's own C++ waits
    return same(model.weight.grad)

def memory(group):
    dist.all_reduce(ones(), group=group)  # makes the memory
    plant("memory")
    dist.all_reduce(values := ones(), group=group)
    return same(values)

def lossless(group, differences=True):
    generator = torch.Generator().manual_seed(0)
    gathered = torch.empty(3 * 65536, dtype=torch.bfloat16)
    plan = backend_of(group).plan_lossless(gathered, gathered[:65536].clone())
    plan = plan.bound_to(torch.zeros(plan.secondary_bytes, dtype=torch.uint8))
    for step in range(2 if differences else 1):
        whole = torch.randn(3 * 65536, generator=generator).bfloat16()
        if step == differences:
            plant()
        plan.run(gathered, whole[rank * 65536 :][:65536].clone()).wait()
    return torch.equal(gathered, whole)

def whole_lossless(group):
    return lossless(group, differences=False)

def message(group):
    values = ones()
    plant()
    if rank == 0:
        dist.send(values, 1, group=group)
    elif rank == 1:
        dist.recv(values, 0, group=group)
    return same(values)

def any_sender(group):
    values = ones()
    plant()
    if rank == 0:
        dist.isend(values, 1, group=group).wait()
    elif rank == 1:
        dist.irecv(values, group=group).wait()
    return same(values)

def sample_2nd(group, following=2):
    for _ in range(following - 1):
        dist.all_reduce(ones(), group=group)
    return all_reduce(group)

def sample_18th(group):
    return sample_2nd(group, following=18)

def sample_message(group):
    next_call(group)  # the one with checksums
    return message(group)

def next_call(group):
    dist.all_reduce(values := ones(), group=group)
    return same(values)

def end_of(call, group):
    try:
        return call(group)
    except RuntimeError as error:
        names = [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__[:2]]
        return [*names, str(error)]

for case in cases:
    for verify in ("sample",) if "sample" in case else (False, True):
        formats = {"all_reduce": "int8:128", "exchanges": "int8:128"}
        options = zcomm.Options(**formats, min_bytes=0, node_size=3 if case == "memory" else 1, verify=verify)
        group = dist.new_group(pg_options=options)
        ends = end_of(globals()[case], group), end_of(next_call, group)
        assert rank > 0 or not shim.is_corrupting(), "the fault was not planted"
        print(json.dumps([case, verify, *ends, zcomm.stats(group).corrupted_messages]), flush=True)
        dist.barrier()
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


@pytest.mark.parametrize("verified", [True, "sample"])
def test_results_have_the_bits_of_unverified_ones(verified: Any) -> None:
    def made(verify: Any) -> list[list[torch.Tensor]]:
        forms = ("single", "in_place", "out_of_place")
        asked = zcomm.Options(all_reduce="int8:128", exchanges="int8:128", min_bytes=0, forms=forms, verify=verify)
        return run(_results, size=4, nodes=[0, 0, 1, 1], options=asked)

    results = made(verified)
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


End = Any  # whether all values are right, or the type of the error, its base, and its text


def ends_of(cases: list[str], shim: Path, folder: Path) -> dict[tuple[str, bool | str], list[tuple[End, End, int]]]:
    """How each case ends on each rank, without and with ``verify``: the call, the group's next one, and the counter."""
    ranks = []
    for rank in range(3):
        preload = {"LD_PRELOAD": str(shim)} if rank == 0 else {}
        command = [sys.executable, "-c", PROGRAM, str(rank), str(folder / "store"), ",".join(cases)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **preload}, stdout=-1, stderr=-1, text=True))
    try:
        printed = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0, 0], [errors for _, errors in printed]
    ends: dict[tuple[str, bool | str], list[tuple[End, End, int]]] = {}
    for shown, _ in printed:
        for case, verify, *end in map(json.loads, shown.splitlines()):
            ends.setdefault((case, verify), []).append((end[0], end[1], end[2]))
    return ends


COLLECTIVES = ["all_reduce", "work", "future", "backward", "memory"]
LOSSLESS = ["lossless", "whole_lossless"]
MESSAGES = ["message", "any_sender"]


@needs_compiler
def test_a_planted_fault_is_an_error_of_each_rank_instead_of_a_wrong_value(shim: Path, tmp_path: Path) -> None:
    found = ends_of([*COLLECTIVES, *LOSSLESS, *MESSAGES], shim, tmp_path)
    assert len(found) == 18
    for case in COLLECTIVES:
        assert found[case, False] == [(False, True, 0)] * 3  # silent
        ends = found[case, True]
        assert sorted(count for _, _, count in ends) == [0, 0, 1]
        for end, following, count in ends:
            for kind, base, text in (end, following):
                assert (kind, base) == ("zcomm.CorruptedWireError", "torch.distributed.DistBackendError")
                assert "corrupted bytes from rank 0: message" in text
            assert ("gave up in all_reduce" in end[2]) == (count == 0)
    for case in LOSSLESS:  # other ranks have what they need
        assert [end is True for end, _, _ in found[case, True]].count(True) == 2
        for verify, name in ((False, "torch.distributed.DistBackendError"), (True, "zcomm.CorruptedWireError")):
            # Without checksums the hash of the gathered values finds the fault, but cannot tell where it was made.
            why = "corrupted bytes from rank 0" if verify else "differences of slot 0: what this rank has made of"
            for end, following, count in found[case, verify]:
                assert end is True or (end[0] == name and f"': {why}" in end[2]), end
                assert following[0] == name and why in following[2]
                assert count == (verify and end is not True)
    for case in MESSAGES:
        assert found[case, False] == [(True, True, 0), (False, True, 0), (True, True, 0)]
        (sent, next_of_sender, _), (received, following, count), _ = found[case, True]
        assert sent is next_of_sender is following is True, "the group goes on"
        assert count == 1 and received[0] == "zcomm.CorruptedWireError"
        assert received[2].endswith(": corrupted bytes: they have another checksum than when they were sent")


@needs_compiler
def test_a_sample_has_checksums_in_one_of_16_collectives_and_in_all_messages(shim: Path, tmp_path: Path) -> None:
    found = ends_of(["sample_2nd", "sample_18th", "sample_message"], shim, tmp_path)
    assert found["sample_2nd", "sample"] == [(False, True, 0)] * 3
    for end, following, _ in found["sample_18th", "sample"]:
        assert end[0] == following[0] == "zcomm.CorruptedWireError"
    assert [end is True for end, _, _ in found["sample_message", "sample"]] == [True, False, True]
    assert found["sample_message", "sample"][1][0][0] == "zcomm.CorruptedWireError"


def test_ranks_that_verify_otherwise_are_refused() -> None:
    def body() -> str:
        group = dist.new_group(pg_options=zcomm.Options(verify="sample" if dist.get_rank() else True))
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        return str(raised.value)

    for text in run(body):
        assert "ranks disagree on the options" in text and "verify='sample'" in text and "verify=True" in text


def test_encryption_that_torch_does_not_have_is_an_error() -> None:
    """Without key files it is one for each torch, which reads the variable once in a process."""
    program = "from zcomm.distributed import backend; backend._devices(None)"
    variables = {**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "RuntimeError" in ended.stderr, ended.stderr
