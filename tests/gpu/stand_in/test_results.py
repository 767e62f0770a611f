"""The backend on GPU tensors gives the bits of the CPU path."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import worlds
from support.calls import logged
from support.stand_in import NCCL, Gather, dist, host, run, values

import zcomm
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.testing import LocalWorld

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 1]], ids=str)
def test_all_collectives_give_the_bits_of_the_cpu_path(nodes: list[int]) -> None:
    size = len(nodes)

    def body() -> None:
        host.set_delays(dist.get_rank() + 1, 50)
        for number, dtype in enumerate(DTYPES):
            numel = 5003 + number
            whole = [values(size * numel, dtype, number, rank) for rank in range(size)]

            def expected(rank, dtype=dtype, numel=numel, number=number, whole=whole):
                gathered = torch.zeros(size, numel, dtype=dtype)
                rank.all_gather(values(numel, dtype, number, rank.rank), gathered)
                scattered = rank.reduce_scatter(
                    whole[rank.rank].clone(), torch.zeros(numel, dtype=dtype), factor=1 / size
                )
                reduced = rank.all_reduce(whole[rank.rank].clone(), "int8:64/int4:64")
                return gathered, scattered, reduced

            gathered, scattered, reduced = LocalWorld(nodes, chunk_bytes=4096).run(expected)[dist.get_rank()]
            memory = torch.zeros(size, numel, dtype=dtype)
            memory[dist.get_rank()].copy_(values(numel, dtype, number))
            with zcomm.override(forms="in_place"):
                dist.all_gather_into_tensor(host.as_cuda(memory), host.as_cuda(memory[dist.get_rank()]))
            output = torch.zeros(numel, dtype=dtype)
            source = whole[dist.get_rank()].clone()
            dist.reduce_scatter_tensor(host.as_cuda(output), host.as_cuda(source), op=dist.ReduceOp.AVG)
            total = whole[dist.get_rank()].clone()
            dist.all_reduce(host.as_cuda(total))
            host.synchronize()
            assert torch.equal(memory, gathered)
            assert torch.equal(output, scattered)
            assert torch.equal(total, reduced)

    run(body, size, nodes=nodes, options=worlds.options(all_reduce="int8:64/int4:64", chunk_bytes=4096))


def test_parts_of_parameters_have_the_bits_that_they_have_in_one_buffer() -> None:
    def body() -> None:
        host.set_delays(dist.get_rank() + 1, 50)
        size, rank, parts = dist.get_world_size(), dist.get_rank(), [(3000, False), (40, True), (1963, False)]
        numel = sum(count for count, _ in parts)
        whole = values(size * numel, torch.bfloat16, 0).view(size, numel)
        apart = [part.contiguous() for part in whole.split([count for count, _ in parts], dim=1)]
        backend, op = backend_of(), dist.ReduceOp.AVG

        def reduced(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
            out, inputs = torch.zeros(numel, dtype=dtype), [host.as_cuda(tensor) for tensor in tensors]
            plan = backend.plan(host.as_cuda(out), inputs, op, parts=parts)
            assert isinstance(plan, _c10d.Operation)
            plan.run(host.as_cuda(out), inputs, op).wait()
            host.synchronize()
            return out

        expected = reduced([whole.float()], torch.float32)
        assert torch.equal(reduced([whole], torch.float32), expected) and bool(expected.any())
        assert torch.equal(reduced(apart, torch.float32), expected)
        assert torch.equal(reduced(apart, torch.bfloat16), reduced([whole], torch.bfloat16))

        shard, gathered = whole[rank].clone(), torch.zeros_like(whole)
        targets = [torch.zeros_like(part) for part in apart]
        for output in (host.as_cuda(gathered), [host.as_cuda(target) for target in targets]):
            plan = backend.plan(output, host.as_cuda(shard), parts=parts)
            assert isinstance(plan, _c10d.Operation)
            plan.run(output, host.as_cuda(shard)).wait()
        host.synchronize()
        assert torch.equal(torch.cat(targets, dim=1), gathered) and bool(gathered.any())

        def on_gpu(num_bytes: int) -> torch.Tensor:
            return host.as_cuda(torch.zeros(num_bytes, dtype=torch.uint8))

        plan = backend.plan(host.as_cuda(gathered), host.as_cuda(shard), parts=parts)
        assert isinstance(plan, _c10d.Operation)
        keeping, wires = plan.bound_to(on_gpu(plan.secondary_bytes)), on_gpu(plan.wires_bytes)
        for gather, source in ((plan, shard), (keeping, shard), (keeping, None)):
            gather.run(None, source if source is None else host.as_cuda(source), wires=wires).wait()
            again, apart = torch.zeros_like(gathered), [torch.zeros_like(target) for target in targets]
            gather.decode(host.as_cuda(again), wires)
            gather.decode([host.as_cuda(each) for each in apart], wires)
            host.synchronize()
            assert torch.equal(again, gathered) and torch.equal(torch.cat(apart, dim=1), gathered)

    run(body, 4, nodes=[0, 0, 1, 1], options=worlds.options(chunk_bytes=4096))


def test_chunks_are_larger_than_on_a_cpu() -> None:
    """By default 128 MiB of all shards are one group of NCCL's; options say otherwise."""

    def num_groups(numel: int) -> int:
        gather = Gather(numel)
        Gather(numel)()  # connects, and compares what ranks call
        host.synchronize()
        before = ctypes.CDLL(NCCL).nccl_host_num_launches()
        gather()
        gather.check()
        return int(ctypes.CDLL(NCCL).nccl_host_num_launches() - before)

    numel = 3 << 18  # of float32: 3 MiB
    assert run(lambda: num_groups(numel), 2) == [1, 1]
    assert run(lambda: num_groups(numel), 2, options=worlds.options(chunk_bytes=1 << 20)) == [3, 3]


def test_the_mean_is_the_mean() -> None:
    def body() -> None:
        numel = 4096
        for op, factor in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5)):
            whole = torch.full((2 * numel,), float(dist.get_rank() + 1))
            output = torch.zeros(numel)
            dist.reduce_scatter_tensor(host.as_cuda(output), host.as_cuda(whole), op=op)
            host.synchronize()
            # 1 and 2 are codes of their own maximum: a block of equal values loses no more than the last bits.
            assert torch.allclose(output, torch.full((numel,), factor), rtol=2**-7, atol=0)

    run(body, 2)


def test_exact_calls_go_to_the_inner_group_of_the_device() -> None:
    def body() -> None:
        import zcomm.distributed.backend

        made = []

        def make(store, rank, size, options):
            made.append(torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size))
            return made[-1]

        zcomm.distributed.backend._make_nccl = make
        numbers = torch.arange(8)
        dist.all_reduce(host.as_cuda(numbers))
        dist.reduce(host.as_cuda(numbers), dst=0)
        assert len(made) == 1
        assert zcomm.stats().all_reduce.exact["not_a_float"].calls == 1
        on_cpu = torch.ones(3)
        dist.all_reduce(on_cpu)
        assert on_cpu.tolist() == [2, 2, 2]

    run(body, 2)


def test_a_torch_without_nccl_says_so() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="this torch was built without NCCL"):
            dist.all_reduce(host.as_cuda(torch.arange(8)))

    run(body, 2)


def test_variables_that_only_exact_calls_obey_are_told_of_once() -> None:
    def body() -> list[str]:
        lines = logged()
        Gather(1000)()
        group = dist.new_group()
        Gather(1000)(group=group)
        return lines

    expected = "exact calls alone obey TORCH_NCCL_NAN_CHECK: see the variables in docs/options.md"
    assert run(body, 2, nodes=[0, 1], env={"TORCH_NCCL_NAN_CHECK": "1"}) == [[expected], []]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_a_group_of_one_node_is_told_that_exact_calls_may_be_faster(nodes: list[int]) -> None:
    def body() -> list[str]:
        lines = logged()
        Gather(1000)()
        Gather(1000)()
        return [line for line in lines if "it has one node" in line]

    assert [len(lines) for lines in run(body, 2, nodes=nodes)] == [int(nodes == [0, 0]), 0]
