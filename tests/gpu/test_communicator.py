"""zcomm.Communicator on a GPU: CuPy arrays, and torch's through DLPack."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu_world import LocalWorld, assert_same_bits, nodes_of, run, values

import zcomm
from zcomm import codec

pytestmark = pytest.mark.cuda_only
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")

EXAMPLE = Path(__file__).parents[2] / "examples" / "cupy_allgather.py"
FORMATS = "int8:128/int4:64"
NUM = 10_007


def connect(node_size: int, **fields: Any) -> zcomm.Communicator:
    """This rank's communicator; Gloo, which the ranks have anyway, carries the group's id."""
    rank, size = dist.get_rank(), dist.get_world_size()
    box = [zcomm.Communicator.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert isinstance(box[0], bytes)
    return zcomm.Communicator(rank, size, box[0], node_size=node_size, **{"timeout": 45.0, **fields})


def expected(size: int, node_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What this rank must hold after an all-gather, a reduce-scatter (mean) and an all-reduce (sum)."""

    def body(rank: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = values(size * NUM, dtype, 1, rank.rank)
        return (
            rank.all_gather(values(NUM, dtype, 0, rank.rank), torch.zeros(size * NUM, dtype=dtype), "int8:256"),
            rank.reduce_scatter(whole, torch.zeros(NUM, dtype=dtype), FORMATS, factor=1.0 / size),
            rank.all_reduce(whole.clone(), FORMATS),
        )

    return LocalWorld(nodes_of(size, node_size)).run(body)[dist.get_rank()]


@pytest.mark.parametrize(("size", "node_size"), [(2, 2), (4, 2)], ids=["1x2", "2x2"])
def test_torch_tensors(size: int, node_size: int) -> None:
    def body() -> None:
        with connect(node_size) as comm:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                shard, whole = values(NUM, dtype).cuda(), values(size * NUM, dtype, 1).cuda()
                gathered, scattered = torch.zeros_like(whole), torch.zeros_like(shard)
                stats = comm.all_gather(shard, gathered)
                comm.reduce_scatter(whole, scattered, formats=FORMATS, op="avg")
                comm.all_reduce(whole, formats=FORMATS)
                torch.cuda.synchronize()
                wants = expected(size, node_size, dtype)
                for got, want in zip((gathered, scattered, whole), wants, strict=True):
                    assert_same_bits(got.cpu(), want, dtype)
                assert stats.wire_bytes == stats.intra_node_bytes + stats.inter_node_bytes > 0

    run(body, size, backend="gloo")


def test_ranks_meet_over_torchs_communicator() -> None:
    """It is borrowed: an abort of zcomm's own leaves it usable."""

    def body() -> None:
        rank, group = dist.get_rank(), dist.new_group(backend="nccl")
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one, group=group)  # before it torch has no communicator
        torch.cuda.synchronize()
        backend: Any = group._get_backend(torch.device("cuda"))
        with zcomm.Communicator.from_nccl(backend._comm_ptr(), timeout=45.0, connect_all=True) as comm:
            assert (comm.rank, comm.size, comm.num_nodes) == (rank, 2, 1)
            published = values(NUM).cuda()
            comm.broadcast(published, 1, format="int8:256")
            torch.cuda.synchronize()
            wire = codec.encode(values(NUM, rank=1), "int8:256")
            assert_same_bits(published.cpu(), codec.decode(wire, "int8:256", torch.empty(NUM)))
            comm.abort("for a test")
        dist.all_reduce(one, group=group)
        assert one.item() == 4.0

    run(body, 2, backend="gloo")


@needs_cupy
def test_cupy_arrays() -> None:
    """On a stream of CuPy's; what comes out is torch's through DLPack, without a copy."""

    def body() -> None:
        import cupy

        with connect(2) as comm, cupy.cuda.Stream(non_blocking=True) as stream:
            shard, whole = (cupy.asarray(values(n, seed=s).numpy()) for n, s in ((NUM, 0), (2 * NUM, 1)))
            gathered, scattered = cupy.zeros_like(whole), cupy.zeros_like(shard)
            comm.all_gather(shard, gathered)
            comm.reduce_scatter(whole, scattered, formats=FORMATS, op="avg")
            comm.all_reduce(whole, formats=FORMATS, stream=stream)
            wire = codec.encode(shard, "int8:256")
            again = codec.decode(wire, "int8:256", cupy.empty_like(shard))
            stream.synchronize()
            for got, want in zip((gathered, scattered, whole), expected(2, 2, torch.float32), strict=True):
                assert_same_bits(torch.from_dlpack(got).cpu(), want)
            own = gathered.reshape(2, NUM)[dist.get_rank()]
            assert bool((own == again).all())
            for array in (gathered, torch.from_dlpack(scattered)):
                comm.all_reduce(array, formats=FORMATS)
            stream.synchronize()

    run(body, 2, backend="gloo")


def test_a_peer_that_does_not_come() -> None:
    """The constructor raises after the timeout; so does a call, and the communicator says so afterwards."""

    def body() -> str:
        comm = connect(2, timeout=10.0)
        shard, out = torch.ones(NUM, device="cuda"), torch.ones(2 * NUM, device="cuda")
        comm.all_gather(shard, out)
        torch.cuda.synchronize()
        dist.barrier()
        text = ""
        if dist.get_rank() == 0:
            comm.all_gather(shard, out)
            torch.cuda.synchronize()  # ends by the timeout
            with pytest.raises(RuntimeError) as caught:
                comm.all_gather(shard, out)
            text = str(caught.value)
        dist.barrier()
        comm.abort("the test is over")
        comm.close()
        with pytest.raises(ValueError, match="closed"):
            comm.all_gather(shard, out)
        return text

    assert "all_gather" in run(body, 2, backend="gloo")[0]


def test_a_graph_of_a_communicator() -> None:
    def body() -> None:
        with connect(2) as comm:
            shard, out = values(NUM).cuda(), torch.zeros(2 * NUM, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                comm.all_gather(shard, out)
            torch.cuda.synchronize()
            want = out.clone()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                comm.all_gather(shard, out)
            dist.barrier()
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(out.cpu(), want.cpu())
            del graph

    run(body, 2, backend="gloo")


@needs_cupy
def test_the_example_runs() -> None:
    command = [sys.executable, str(EXAMPLE), "--elements", "100003"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for format in ("exact", "bf16", "int8:256", "int4:128"):
        assert format in done.stdout, done.stdout
