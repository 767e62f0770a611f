"""The DDP hook: compressed means, replicas that agree, and nothing else compressed."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import newly_counted
from support.decisions import FAST_LINK, table
from support.expected import HALF_STEP, assert_same_bits
from support.trainers import ddp, under_gloo
from support.training import (
    EXACT_STEPS,
    STEPS,
    WIDTH,
    Job,
    assert_same_tensors,
    assert_within_one_percent,
    make_batch,
    make_model,
    sgd,
    trained,
)
from support.worlds import collect, options, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zcomm


def gradients_of(model: nn.Module) -> torch.Tensor:
    inputs, targets = make_batch(dist.get_rank())
    (model(inputs) - targets).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1]], ids=str)
def test_means_are_within_the_bound_and_replicas_agree(nodes: list[int]) -> None:
    def body() -> None:
        exact = gradients_of(DistributedDataParallel(make_model()))
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.02)
        model.register_comm_hook(zcomm.ddp.CompressState("int8:128"), zcomm.ddp.compress_hook)
        gradients_of(model)  # after which DDP makes its buckets: several are under way
        model.zero_grad()
        before = zcomm.stats().all_reduce.calls
        compressed = gradients_of(model)
        assert zcomm.stats().all_reduce.calls >= before + 2
        # Each rank's contribution is quantized at most twice on its way, the mean once more.
        largest = gradients_of(make_model()).abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert (compressed - exact).abs().max() <= 3 * largest / 127 * HALF_STEP * 1.02
        everybody = [torch.empty_like(compressed) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, compressed)
        assert all(torch.equal(other, compressed) for other in everybody)

    run(body, len(nodes), nodes=nodes, options=options())


def hooked(formats: str) -> Job:
    def wrap() -> nn.Module:
        model = ddp()
        model.register_comm_hook(zcomm.ddp.CompressState(formats), zcomm.ddp.compress_hook)
        return model

    return Job(wrap, 2)


def test_training_with_the_hook() -> None:
    """Every loss of 50 steps is within 1 % of gloo's; with exact formats everything is gloo's, bit for bit."""
    want = under_gloo("DDP")
    got = trained(hooked("int8:128/int4:128"), options=options())
    for result in got:
        assert result.compressed["all_reduce"] >= STEPS
        assert_same_tensors(result.last_parameters, got[0].last_parameters, "replicas")
    assert_within_one_percent(got, want)
    for exact, gloo in zip(trained(hooked("exact"), EXACT_STEPS, options=options()), want, strict=True):
        assert exact.compressed["all_reduce"] == 0
        assert exact.losses == gloo.losses[:EXACT_STEPS]
        assert_same_tensors(exact.parameters, gloo.parameters, "parameters")


def test_ranks_may_join_after_fewer_batches() -> None:
    """Also one without any. Error feedback and the buffers of batch norms stay alike on all ranks."""

    def body() -> None:
        def train(state: zcomm.ddp.CompressState | None) -> torch.Tensor:
            model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(WIDTH), make_model()), bucket_cap_mb=0.02)
            if state is not None:
                model.register_comm_hook(state, zcomm.ddp.compress_hook)
            optimizer = sgd(model)
            with model.join():
                for _ in range((2, 4, 0)[dist.get_rank()]):
                    optimizer.zero_grad()
                    gradients_of(model)
                    optimizer.step()
            return torch.cat([value.flatten().float() for value in model.state_dict().values()])

        exact = train(None)
        compressed = train(zcomm.ddp.CompressState("int8:128", error_feedback=zcomm.codec.ErrorFeedback()))
        assert zcomm.stats().all_reduce.calls > 0
        assert 0 < (compressed - exact).norm() < 0.01 * exact.norm()
        everybody = [torch.empty_like(compressed) for _ in range(3)]
        dist.all_gather(everybody, compressed)
        assert all(torch.equal(other, compressed) for other in everybody)

    run(body, 3, nodes=[0, 1, 1], options=options())


def test_only_the_model_with_the_hook_is_compressed() -> None:
    def body() -> None:
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
        gradients_of(model)
        calls = zcomm.stats().all_reduce.calls
        assert calls > 0
        gradients_of(DistributedDataParallel(make_model()))
        dist.all_reduce(torch.ones(100_000))
        assert zcomm.stats().all_reduce.calls == calls

    run(body, 2, options=options())


@pytest.mark.parametrize("feedback", [False, True])
def test_the_formats_around_a_step_have_the_last_word(feedback: bool) -> None:
    def body() -> None:
        want = gradients_of(DistributedDataParallel(make_model()))
        model = DistributedDataParallel(make_model())
        state = zcomm.ddp.CompressState("int4:128", error_feedback=zcomm.codec.ErrorFeedback() if feedback else None)
        model.register_comm_hook(state, zcomm.ddp.compress_hook)
        with zcomm.exact():
            assert torch.equal(gradients_of(model), want)
        model.zero_grad()
        with zcomm.override(all_reduce="bf16"):
            error = (gradients_of(model) - want).abs().max()
        assert 0 < error <= want.abs().max() * 2**-6
        model.zero_grad()
        assert (gradients_of(model) - want).abs().max() > want.abs().max() * 2**-5

    run(body, 2, options=options())


def layers(state: Any, hook: Any) -> list[torch.Tensor]:
    """Gradients under the hook, in their second backward pass: large ones of 16 bits, and sparse ones."""
    gradients = []
    for layer, inputs, factor in [
        (nn.Linear(30, 30, bias=False).half(), torch.ones(1, 30).half(), 40_000),
        (nn.Embedding(100, 8, sparse=True), torch.arange(10) + 5 * dist.get_rank(), 1),
    ]:
        model = DistributedDataParallel(layer)
        model.register_comm_hook(state, hook)
        for _ in range(2):
            model.zero_grad()
            (model(inputs).sum() * factor).backward()
        gradients.append(layer.weight.grad.to_dense())
    return gradients


@pytest.mark.parametrize("feedback", [False, True])
def test_exact_buckets_are_those_of_the_hook_of_torch(feedback: bool) -> None:
    def body() -> None:
        state = zcomm.ddp.CompressState(error_feedback=zcomm.codec.ErrorFeedback() if feedback else None)
        halves, embedding = layers(state, zcomm.ddp.compress_hook)
        assert (halves == 40_000).all()  # their sum is beyond float16
        wanted = layers(None, allreduce_hook)
        assert_same_bits(halves, wanted[0], "float16")
        assert_same_bits(embedding, wanted[1], "sparse")

    run(body, 2)


@pytest.mark.parametrize("compress", ["always", "auto"])
def test_exact_buckets_are_counted_by_their_reason(compress: Any) -> None:
    def body() -> None:
        def reasons(layer: nn.Module, inputs: torch.Tensor, formats: str = "int8:128") -> dict[str, int]:
            model = DistributedDataParallel(layer)
            feedback = zcomm.codec.ErrorFeedback()
            model.register_comm_hook(zcomm.ddp.CompressState(formats, error_feedback=feedback), zcomm.ddp.compress_hook)
            found: Counter[str] = Counter()
            for _ in range(3):
                outputs = model(inputs)
                found.update(newly_counted(lambda outputs=outputs: outputs.abs().sum().backward()))
            return {name: calls for name, calls in found.items() if name.startswith("all_reduce")}

        small, wide = torch.ones(1, 8), torch.ones(1, 300)
        assert reasons(nn.Linear(8, 8), small) == {"all_reduce: min_bytes": 3}
        assert reasons(nn.Linear(300, 300).double(), wide.double()) == {"all_reduce: dtype": 3}
        assert reasons(nn.Linear(300, 300).to(torch.complex64), wide.to(torch.complex64)) == {"all_reduce: dtype": 3}
        assert reasons(nn.Embedding(100, 8, sparse=True), torch.arange(10)) == {"all_reduce: layout": 3}
        assert reasons(nn.Linear(300, 300), wide, "exact") == {"all_reduce: format_exact": 3}
        with zcomm.exact():
            assert reasons(nn.Linear(8, 8), small) == {"all_reduce: format_exact": 3}
        with zcomm.override(all_reduce="bf16", min_bytes=1 << 30):
            assert reasons(nn.Linear(300, 300), wide) == {"all_reduce: min_bytes": 3}
        assert zcomm.stats().rehearsals.calls == 0

    run(body, 2, options=zcomm.Options(compress=compress, min_bytes=1 << 12))


@pytest.mark.parametrize("how", ["a mesh", "groups", "one state for both"])
def test_gradients_are_averaged_over_the_models_own_group(how: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        group = mesh.get_group("dp")
        among = {"device_mesh": mesh["dp"]} if how == "a mesh" else {"process_group": group}
        model = DistributedDataParallel(nn.Linear(256, 64, bias=False), **among)
        state = zcomm.ddp.CompressState("int8:128")
        model.register_comm_hook(state, zcomm.ddp.compress_hook)
        models = [(model, [2 * (rank // 2), 2 * (rank // 2) + 1])]
        if how == "one state for both":
            other = DistributedDataParallel(nn.Linear(256, 64, bias=False))
            other.register_comm_hook(state, zcomm.ddp.compress_hook)
            models.append((other, [0, 1, 2, 3]))
        for _ in range(2):
            for each, ranks in models:
                each.zero_grad()
                each(torch.full((1, 256), 4.0**rank)).sum().backward()
                wanted = sum(4.0**peer for peer in ranks) / len(ranks)
                torch.testing.assert_close(each.module.weight.grad, torch.full((64, 256), wanted), rtol=0.03, atol=0)
        assert zcomm.stats(group).all_reduce.calls == 2

    run(body, 4, options=options())


@pytest.mark.parametrize("how", ["with tensor parallelism", "wrapped again", "in a hook of the user's"])
def test_the_group_is_that_of_the_model(how: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer, state = nn.Linear(256, 64, bias=False), zcomm.ddp.CompressState("int8:128")
        if how == "with tensor parallelism":
            layer = parallelize_module(layer, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        if how == "wrapped again":
            kept = DistributedDataParallel(layer)
            kept.register_comm_hook(state, zcomm.ddp.compress_hook)
        model = DistributedDataParallel(layer, device_mesh=mesh["dp"])
        if how == "in a hook of the user's":

            def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP inspects annotations
                return zcomm.ddp.compress_hook(state, bucket)

            model.register_comm_hook(None, hook)
        else:
            model.register_comm_hook(state, zcomm.ddp.compress_hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 256), 4.0 ** (rank // 2))).sum().backward()
        dp = zcomm.stats(mesh.get_group("dp")).all_reduce
        assert (dp.calls, zcomm.stats().all_reduce.calls) == (2, 0)

    run(body, 4, options=options())


def test_gradients_of_no_known_model_are_refused() -> None:
    def body() -> None:
        model = DistributedDataParallel(nn.Linear(300, 300))
        dist._register_comm_hook(model.reducer, zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
        model(torch.ones(1, 300)).sum().backward()
        assert zcomm.stats().all_reduce.calls == 1  # of the only group
        dist.new_group()
        with pytest.raises(ValueError, match="process_group: expected the model's"):
            model(torch.ones(1, 300)).sum().backward()

    run(body, 2, options=options())


def test_a_model_of_another_backend_is_refused() -> None:
    def body() -> None:
        model = DistributedDataParallel(nn.Linear(300, 300), process_group=dist.new_group(backend="gloo"))
        model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
        with pytest.raises(ValueError, match=r"expected the backend 'zcomm'.* got 'gloo'"):
            model(torch.ones(1, 300)).sum().backward()

    run(body, 2)


def test_what_gains_nothing_stays_exact(tmp_path: Path) -> None:
    def body() -> None:
        model = DistributedDataParallel(nn.Linear(300, 300))
        state = zcomm.ddp.CompressState("int8:128", error_feedback=zcomm.codec.ErrorFeedback())
        model.register_comm_hook(state, zcomm.ddp.compress_hook)
        for _ in range(4):
            model(torch.ones(1, 300)).sum().backward()
        assert zcomm.stats().all_reduce.calls == 0
        assert {reason: calls.calls for reason, calls in zcomm.stats().all_reduce.exact.items()} == {"no_gain": 4}

    run(body, 2, options=zcomm.Options(compress="auto", decisions=table(tmp_path, FAST_LINK)), nodes=[0, 1])


def test_residuals_of_other_ranks_or_nodes_are_refused(tmp_path: Path) -> None:
    def step(feedback: zcomm.codec.ErrorFeedback) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(200, 200))
        state = zcomm.ddp.CompressState("int8:128", error_feedback=feedback)
        model.register_comm_hook(state, zcomm.ddp.compress_hook)
        for _ in range(3):
            model(torch.ones(1, 200)).sum().backward()

    def path() -> Path:
        return tmp_path / f"{dist.get_rank()}"

    def save() -> None:
        feedback = zcomm.codec.ErrorFeedback()
        step(feedback)
        assert feedback.memory_bytes() > 0
        torch.save(feedback.state_dict(), path())

    def load() -> None:
        feedback = zcomm.codec.ErrorFeedback()
        feedback.load_state_dict(torch.load(path()))
        step(feedback)

    def refuse() -> None:
        with pytest.raises(
            ValueError, match=r"is of 40200 torch\.float32 in int8:128 of 2x1, .* bytes, this reduction is 40200 .* of "
        ):
            load()

    run(save, 2, nodes=[0, 1])
    run(load, 2, nodes=[0, 1])
    run(refuse, 2, nodes=[0, 0])


@pytest.mark.promise(9)
@pytest.mark.parametrize("formats", ["int8:128", "exact"])
def test_a_lost_rank_is_an_error_of_the_backward_pass(formats: str) -> None:
    def body() -> None:
        model = DistributedDataParallel(nn.Linear(200, 200))  # one bucket
        model.register_comm_hook(zcomm.ddp.CompressState(formats), zcomm.ddp.compress_hook)
        for _ in range(2):  # DDP rebuilds its buckets before the second step
            model(torch.ones(8, 200)).sum().backward()
        if dist.get_rank() == 1:
            time.sleep(0.5)  # so that rank 0 is in its call
            os._exit(3)
        with pytest.raises(RuntimeError):
            model(torch.ones(8, 200)).sum().backward()

    left, _ = collect(body, 2, grace=30.0)
    assert left.finished and left.error is None, left


@pytest.mark.promise(9)
def test_ranks_whose_formats_differ_are_an_error_of_the_backward_pass() -> None:
    def body() -> None:
        model = DistributedDataParallel(nn.Linear(200, 200))  # one bucket
        formats = ("int8:128", "int4:128")[dist.get_rank()]
        model.register_comm_hook(zcomm.ddp.CompressState(formats), zcomm.ddp.compress_hook)
        with pytest.raises(RuntimeError, match=r"int[48]:128.*int[48]:128"):
            model(torch.ones(8, 200)).sum().backward()

    outcomes = collect(body, 2, grace=30.0)
    assert all(one.finished and one.error is None for one in outcomes), outcomes


@pytest.mark.parametrize(("formats", "error"), [("int8:100", ValueError), (8, TypeError)])
def test_wrong_formats_are_refused_at_once(formats: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^formats: (format: )?expected"):
        zcomm.ddp.CompressState(formats)


def test_a_hook_without_a_state_is_refused() -> None:
    def body() -> None:
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(None, zcomm.ddp.compress_hook)
        with pytest.raises(TypeError, match=r"state: expected a zcomm.ddp.CompressState, got None"):
            gradients_of(model)

    run(body, 2)


def test_another_backend_is_refused() -> None:
    def body() -> None:
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
        with pytest.raises(ValueError, match="expected the backend 'zcomm'"):
            gradients_of(model)

    run(body, 2, backend="gloo")


def test_trainers_that_name_no_backend() -> None:
    def body() -> None:
        zcomm.install_as_default()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert zcomm.stats().all_reduce.calls == 0  # raises if the group is not zcomm's
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]

    run(body, 1, backend=None)
