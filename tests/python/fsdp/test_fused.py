"""FSDP2's buffers without memory: fused steps have the bits of others, and tell what was fused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp_model import NODES, WIDTH, batch, sharded
from support.worlds import options, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import zcomm
from zcomm.feedback import ErrorFeedback
from zcomm.fsdp import collectives, compress
from zcomm.fsdp.fused import Buffer, Deferred

Made = tuple[nn.Module, Any]


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).square().sum() * factor
    return loss


def after_steps(model: nn.Module, backward: Callable[[nn.Module], None], steps: int = 3) -> list[torch.Tensor]:
    """Return this rank's shards of all parameters, and the gradients of the last step."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, fused=True)
    gradients: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        gradients = [local(each.grad) for each in model.parameters() if each.grad is not None]
        optimizer.step()
    return [local(each).clone() for each in model.parameters()] + gradients


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def once(model: nn.Module) -> None:
    loss_of(model).backward()


def accumulated(model: nn.Module) -> None:
    assert isinstance(model, FSDPModule)
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch == 2)
        loss_of(model, 1.0 + micro_batch).backward()


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else None


def even_columns() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 16))
    fully_shard(model, shard_placement_fn=by_columns)
    return model


def frozen() -> nn.Module:
    model = sharded()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" not in name)
    return model


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    fully_shard(model)
    return model


def checkpointed() -> nn.Module:
    return sharded(first=lambda model: apply_activation_checkpointing(model, check_fn=lambda m: m is model[0]))


def precise(parameters: torch.dtype, reduced: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=reduced))


def replicated() -> nn.Module:
    return sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "float32": (sharded, once),
    "accumulated": (sharded, accumulated),
    "bfloat16, reduced in float32": (precise(torch.bfloat16, torch.float32), once),
    "bfloat16, accumulated": (precise(torch.bfloat16, torch.float32), accumulated),
    "bfloat16": (precise(torch.bfloat16, torch.bfloat16), once),
    "kept after the forward pass": (lambda: sharded(reshard_after_forward=False), once),
    "in a smaller mesh after the forward pass": (lambda: sharded(reshard_after_forward=2), once),
    "by columns": (even_columns, once),
    "frozen": (frozen, once),
    "tied": (tied, once),
    "checkpointed": (checkpointed, once),
    "replicated": (replicated, once),
}


def trained(case: str, fused: bool, **settings: Any) -> tuple[list[torch.Tensor], int, int, int]:
    """The weights, gathers and reductions that were fused, and the bytes that were reduced, as uncompressed."""
    make, backward = CASES[case]
    model = make()
    compression = compress(model, fused=fused, **settings)
    before = zcomm.stats().reduce_scatter.bytes
    values = after_steps(model, backward)
    stats = compression.stats().values()
    num_bytes = zcomm.stats().reduce_scatter.bytes - before
    return values, sum(one.gathers_fused for one in stats), sum(one.reduces_fused for one in stats), num_bytes


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("decoded", ["at once", "later"])  # later, as on GPUs
@pytest.mark.parametrize("keep_in_node", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fused_steps_have_the_bits_of_others(case: str, keep_in_node: bool, decoded: str) -> None:
    def body() -> None:
        if decoded == "later":
            collectives.decodes_later = lambda device: True
        settings: dict[str, Any] = {"weights": "int8:64", "gradients": "int8:64/int4:32", "keep_in_node": keep_in_node}
        fused, gathers, reduces, num_bytes = trained(case, True, **settings)
        assert gathers > 0 and reduces > 0
        copied, gathers, reduces, of_copied = trained(case, False, **settings)
        assert gathers == reduces == 0 and num_bytes == of_copied
        assert_same(fused, copied)

    run(body, 4, nodes=NODES, options=options(min_bytes=1))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("bfloat16")])
@pytest.mark.parametrize("nodes", [NODES, [0, 1, 1, 1], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("max_bytes", [None, 0])
def test_lossless_gathers_write_into_the_parameters(case: str, nodes: list[int], max_bytes: int | None) -> None:
    def body() -> None:
        settings: dict[str, Any] = {"weights": "lossless", "gradients": "int8:64", "max_bytes": max_bytes}
        fused, gathers, *_ = trained(case, True, **settings)
        assert (gathers > 0) == (max_bytes is None)
        copied, gathers, *_ = trained(case, False, **settings)
        assert gathers == 0
        assert_same(fused, copied)

    run(body, 4, nodes=nodes, options=options(min_bytes=1))


@pytest.mark.parametrize(
    ("parameters", "reduced", "weights", "gathers", "reduces"),
    [
        (torch.float32, torch.bfloat16, "int8:64", True, False),  # rounded before they are reduced
        (torch.float16, torch.float16, "int8:64", True, False),  # divided before they are reduced
        (torch.bfloat16, torch.bfloat16, "exact", False, True),
    ],
    ids=str,
)
def test_what_cannot_be_fused_is_copied(
    parameters: torch.dtype, reduced: torch.dtype, weights: str, gathers: bool, reduces: bool
) -> None:
    def body() -> None:
        results = []
        for fused in (True, False):
            model = precise(parameters, reduced)()
            compression = compress(model, weights=weights, gradients="int8:64", fused=fused)  # type: ignore[arg-type]
            results.append(after_steps(model, once))
            stats = list(compression.stats().values())
            assert any(one.gathers_fused for one in stats) == (fused and gathers)
            assert any(one.reduces_fused for one in stats) == (fused and reduces)
        assert_same(*results)

    run(body, 4, nodes=NODES, options=options(min_bytes=1))


def test_with_error_feedback_the_state_is_that_of_copied_steps() -> None:
    def body() -> None:
        states, results = [], []
        for fused in (True, False):
            feedback = ErrorFeedback()
            model = precise(torch.bfloat16, torch.float32)()
            compress(model, gradients="int4:32", error_feedback=feedback, fused=fused)
            results.append(after_steps(model, once))
            states.append(copy.deepcopy(feedback.state_dict()))
        assert_same(*results)
        assert_same(*[list(tensors_in(state)) for state in states])
        assert str(states[0].keys()) == str(states[1].keys())

    run(body, 4, nodes=NODES, options=options(min_bytes=1))


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)


def test_exact_calls_in_between_are_copied() -> None:
    def body() -> None:
        results = []
        for fused in (True, False):
            model = sharded()
            compression = compress(model, weights="int8:64", gradients="int8:64", fused=fused)

            def backward(model: nn.Module) -> None:
                with zcomm.exact():
                    once(model)

            results.append(after_steps(model, backward))
            assert not any(one.gathers_fused + one.reduces_fused for one in compression.stats().values())
        assert_same(*results)

    run(body, 4, nodes=NODES, options=options(min_bytes=1))


def peaks_of(fused: bool) -> tuple[int, int]:
    """Return the most bytes of a forward and of a backward pass."""
    torch.manual_seed(0)
    model = nn.Embedding(1024, 1024)  # a product of matrices takes memory of its own, more or less by the processor
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    compress(model, weights="int8:64", gradients="int8:64", keep_in_node=False, fused=fused)
    inputs = torch.tensor([0, 1023])
    for _ in range(2):
        model(inputs).sum().backward()
    losses: list[torch.Tensor] = []
    return peak_of(lambda: losses.append(model(inputs).sum())), peak_of(lambda: losses.pop().backward())


def test_memory_of_a_step_falls_by_both_buffers() -> None:
    def body() -> None:
        forward, backward = peaks_of(fused=True)
        forward_copied, backward_copied = peaks_of(fused=False)
        few = 128 * 1024  # scratch memory, activations
        own = 1024 * 1024  # this rank's shard in bfloat16, which is encoded
        assert forward_copied - forward >= 2 * own - own - few  # gathered in bfloat16
        assert backward_copied - backward >= 4 * own - few  # reduced in float32

    run(body, 2, nodes=[0, 1], options=options())


def test_memory_of_a_forward_pass_falls_of_four_ranks_that_decode_later() -> None:
    """As on GPUs: the wires and this rank's shard, twice, take less than the gathered buffer."""

    def body() -> None:
        collectives.decodes_later = lambda device: True
        assert peaks_of(fused=True)[0] < 0.95 * peaks_of(fused=False)[0]

    run(body, 4, nodes=[0, 1, 2, 3], options=options())


def peak_of(step: Callable[[], Any]) -> int:
    """Return the most bytes that torch had allocated at a time, beyond those at the begin, as its profiler counts."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    held = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_a_deferred_buffer_gets_memory_where_another_operation_reads_it() -> None:
    buffer = Buffer(lambda: torch.zeros(6))
    deferred = Deferred(buffer, [6], torch.float32, torch.device("cpu"))
    view = deferred.view(2, -1)
    assert isinstance(view, Deferred) and view.shape == (2, 3)
    buffer.copy_gradients([torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([7.0])], 2)
    assert [each.tolist() for each in buffer.gradients()] == [[1, 2, 3, 0], [7, 0]]
    assert (view + 1).tolist() == [[2, 3, 8], [4, 1, 1]]
    assert buffer.gradients() == []  # may have been changed since
    assert deferred.sum().item() == 13


def test_gradients_are_freed_once_they_are_reduced_and_not_read_again() -> None:
    """FSDP2 frees its buffer, in place of which they are kept, only when it reduces the next layer."""
    buffer, gradient = Buffer(lambda: torch.zeros(6)), torch.ones(6)
    buffer.copy_gradients([gradient], 2)
    held = weakref.ref(gradient)
    del gradient
    assert held() is not None
    buffer.release_gradients()
    assert held() is None
    with pytest.raises(RuntimeError, match="read once more after their reduction"):
        Deferred(buffer, [6], torch.float32, torch.device("cpu")).sum()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("keep_in_node", [True, False])
def test_writes_while_an_asynchronous_gather_is_under_way_do_not_reach_it(fused: bool, keep_in_node: bool) -> None:
    """As in FSDP2, which copies a shard when its gather begins."""

    def body() -> None:
        model: Any = nn.Linear(2048, 2048, bias=False)
        fully_shard(model)
        compress(model, weights="int8:256", fused=fused, keep_in_node=keep_in_node)
        model.unshard()
        model.reshard()
        for _ in range(3):
            with torch.no_grad():
                model.weight.fill_(1.0)
            handle = model.unshard(async_op=True)
            with torch.no_grad():
                model.weight.fill_(200.0)
            handle.wait()
            assert bool(model.weight.lt(2).all())
            model.reshard()

    run(body, 2, nodes=[0, 1], options=options(min_bytes=1))


def test_a_shard_is_held_while_its_wires_are_under_way() -> None:
    """FSDP2 casts it on a stream of its own, which would use its memory again before the gather has read it."""
    buffer = Buffer(lambda: torch.empty(8))
    shard = weakref.ref(buffer.copy_shard([torch.ones(4)], 0))
    buffer.decode_later(lambda values: None)
    gc.collect()
    assert shard() is not None


def test_a_later_decode_touches_no_parameter_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a group that is copied, as a tensor subclass gathers other data: on a GPU the memory of parameters
    belongs to the stream that computes."""

    def body() -> None:
        def refuse(*_: Any) -> None:
            raise AssertionError("parameters have memory before the copy-out")

        monkeypatch.setattr(collectives, "decodes_later", lambda device: True)
        part = collectives._fsdp2.gathered_part
        monkeypatch.setattr(collectives._fsdp2, "gathered_part", lambda param: (part(param)[0], None))
        monkeypatch.setattr(collectives._fsdp2, "unsharded_data", refuse)
        _, gathers, *_ = trained("bfloat16", True, weights="int8:64", gradients="int8:64")
        assert gathers == 0

    run(body, 4, nodes=NODES, options=options(min_bytes=1))
