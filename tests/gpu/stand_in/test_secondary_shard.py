"""Secondary shards between "GPUs": CUDA graphs, and weights that change in a way that PyTorch does not count."""

from __future__ import annotations

from typing import Any

import pytest
from support.stand_in import dist, host, run, torch

from zcomm._c10d import Site
from zcomm.distributed.groups import backend_of
from zcomm.fsdp.gather_call import GatherCall, GatherWay
from zcomm.fsdp.notices import Notices
from zcomm.fsdp.rule import ModuleStats
from zcomm.fsdp.secondary_shard import MemoryBudget, SecondaryShard

NODES = [0, 0, 1, 1]
NUM = 5000


class Module:
    """What FSDP2 gathers of one module in a forward and a backward pass: each time it copies the shard
    into a buffer on the GPU, and gathers in place."""

    def __init__(self, was_gathered: bool = True) -> None:
        self.memory = torch.zeros(2, dist.get_world_size(), NUM)
        self.outputs = [host.as_cuda(memory) for memory in self.memory]
        self.inputs = [host.as_cuda(memory[dist.get_rank()]) for memory in self.memory]
        self.plan = backend_of().plan(self.outputs[0], self.inputs[0])
        self.counted = ModuleStats("", "", elements=0, exempt_elements=0)
        notices, site = Notices("layers.0"), Site("layers.0", [])
        self.shards = SecondaryShard([], notices, site, self.counted, MemoryBudget(None), checks=True)
        self.kept = torch.zeros(self.plan.secondary_bytes, dtype=torch.uint8)
        if was_gathered:
            self.shards._bound, self.shards._plan = self.plan.bound_to(host.as_cuda(self.kept)), self.plan

    def set(self, step: int) -> None:
        host.synchronize()
        self.memory.fill_(-1.0)
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.memory[:, dist.get_rank()] = torch.randn(NUM, generator=generator)

    def gather(self, times: int = 2) -> None:
        for output, shard in list(zip(self.outputs, self.inputs, strict=True))[:times]:
            self.shards.gather(
                GatherCall(GatherWay.COPIED, output, shard, dist.group.WORLD, self.plan, False, previous=None)
            )

    def gathers(self) -> tuple[int, int]:
        return self.counted.gathers_inter_node, self.counted.gathers_intra_node

    def result(self) -> torch.Tensor:
        host.synchronize()
        return self.memory.clone()


def expected(step: int) -> torch.Tensor:
    """By an eager gather across nodes."""
    module = Module()
    module.set(step)
    module.gather()
    result = module.result()
    assert torch.equal(result[0], result[1])
    return result


def test_a_graph_gathers_the_weights_of_its_replay() -> None:
    """Its first gather of a module crosses nodes, although the weights have not changed since the one before it."""

    def body() -> None:
        wanted = [expected(step) for step in range(4)]
        module = Module()
        module.set(0)
        module.gather()  # micro-batch 1, eager
        assert module.gathers() == (1, 1)
        module.set(0)
        host.set_stream(7)
        host.begin_capture()
        module.gather()  # micro-batch 2, captured
        graph = host.end_capture()
        assert module.gathers() == (2, 2)
        for step in (1, 2):
            module.shards.outdate()  # as an optimizer's step does
            module.set(step)
            graph.replay()
            assert torch.equal(module.result(), wanted[step])
        for intra_node in (3, 5):  # eager again: the host does not know what the replays have left
            module.set(3)
            module.gather()
            assert module.gathers() == (3, intra_node)
            assert torch.equal(module.result(), wanted[3])
        module.shards.check_mark()

    run(body, len(NODES), nodes=NODES)


def test_a_module_that_was_never_gathered_has_no_secondary_shard_in_a_graph() -> None:
    def body() -> None:
        wanted = expected(5)
        module = Module(was_gathered=False)
        module.set(0)
        host.set_stream(7)
        host.begin_capture()
        module.gather()
        graph = host.end_capture()
        assert module.gathers() == (0, 0) and module.counted.gathers_plain == 2
        module.set(5)
        graph.replay()
        assert torch.equal(module.result(), wanted)

    run(body, len(NODES), nodes=NODES)


@pytest.mark.parametrize("writers", [[0, 1, 2, 3], [1]], ids=str)
def test_uncounted_changes_give_nan_on_their_node_and_an_error(writers: list[int]) -> None:
    def body() -> Any:
        module = Module()
        module.set(0)
        module.gather()
        module.set(int(dist.get_rank() in writers))
        module.gather(times=1)  # of weights that have changed, as the version counters do not say
        result = module.result()[0]
        node = {rank for rank in range(4) if NODES[rank] == NODES[dist.get_rank()]}
        # A rank keeps the wires of the ranks of its local rank.
        stale = {slot for writer in node & set(writers) for slot in range(4) if slot % 2 == writer % 2}
        for slot in range(4):
            assert bool(result[slot].isnan().all()) == (slot in stale), slot
        if dist.get_rank() in writers:
            with pytest.raises(RuntimeError, match=r"layers.0: its weights were modified .*invalidate"):
                module.gather()
        return None

    run(body, len(NODES), nodes=NODES)
