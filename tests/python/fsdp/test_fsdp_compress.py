"""Formats for each module and parameter of FSDP2: what each parameter of a flat message arrives as, bit for bit."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged, newly_counted
from support.expected import assert_same_bits, reduce_scatter
from support.fsdp_model import NODES, WIDTH, Block, batch, expected_of, gathered, sharded, whole
from support.worlds import options, run, sampling
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zcomm
from zcomm.distributed import _fsdp2
from zcomm.distributed.groups import backend_of
from zcomm.distributed.report import report_of
from zcomm.fsdp import compress, one_dimensional


@pytest.mark.parametrize("keep_in_node", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["after fully_shard", "before"])
def test_each_parameter_arrives_in_the_format_that_was_chosen_for_it(before: bool, keep_in_node: bool) -> None:
    def body() -> None:
        def settings(model: nn.Sequential) -> None:
            compress(model, weights="int8:64", keep_in_node=keep_in_node)
            compress(model[1], weights="int4:32", keep_in_node=keep_in_node, exempt=["norm.*", one_dimensional])
            compress(model[2], weights="exact")

        model = sharded(first=settings if before else None)
        if not before:
            settings(model)
        for _ in range(2):
            values = gathered(model)
            for name, parameter in model.named_parameters():
                format = "exact" if parameter.ndim < 2 or name[0] == "2" else "int8:64" if name[0] == "0" else "int4:32"
                assert_same_bits(values[name], expected_of(parameter, format))

    run(body, 4, nodes=NODES, options=options())


@pytest.mark.parametrize("nodes", [NODES, [0, 0, 1], [0, 1]], ids=str)
def test_each_gradient_arrives_in_the_format_that_was_chosen_for_it(nodes: list[int]) -> None:
    formats = "int8:64/int4:32"

    def body() -> None:
        size = dist.get_world_size()

        def backward(model: nn.Module) -> None:
            model(batch()).square().sum().backward()

        torch.manual_seed(0)
        plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        backward(plain)  # this rank's own gradients
        model = sharded()
        compress(model, weights="exact", gradients=formats)
        backward(model)
        for (name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert own.grad is not None and isinstance(parameter.grad, DTensor)
            contributions: list[Any] = [None] * size
            dist.all_gather_object(contributions, own.grad)
            rows = -(-own.size(0) // size)

            def slot(gradient: torch.Tensor, rows: int = rows, own: torch.Tensor = own) -> torch.Tensor:
                padded = torch.cat([gradient, gradient.new_zeros(rows * size - len(gradient), *own.shape[1:])])
                return padded[dist.get_rank() * rows :][:rows].reshape(-1)

            format = "exact" if own.ndim < 2 else formats
            expected = reduce_scatter(
                [slot(gradient) for gradient in contributions], dist.get_rank(), format, nodes, 1 / size
            )
            local = parameter.grad.to_local().reshape(-1)
            assert_same_bits(local, expected[: local.numel()]), name

    run(body, len(nodes), nodes=nodes, options=options())


def test_exact_and_override_have_the_last_word() -> None:
    def body() -> None:
        model = sharded()
        compress(model, weights="int4:32")
        with zcomm.exact():
            for name, parameter in model.named_parameters():
                assert_same_bits(gathered(model)[name], whole(parameter))
        with zcomm.override(all_gather="int8:32"):
            assert_same_bits(gathered(model)["1.up.weight"], expected_of(model[1].up.weight, "int8:32"))
        with zcomm.override(min_bytes=1 << 30):
            assert_same_bits(gathered(model)["1.up.weight"], whole(model[1].up.weight))

    run(body, 2, options=options())


def test_traffic_is_counted_for_each_module_and_adds_up() -> None:
    def body() -> None:
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        compression = compress(model)
        for _ in range(2):
            model(batch()).float().square().sum().backward()
        dist.barrier()
        modules = compression.stats().values()
        total = zcomm.stats()
        assert sum(one.gathered_inter_node_bytes for one in modules) == total.all_gather.inter_node_bytes > 0
        assert sum(one.gathered_intra_node_bytes for one in modules) == total.all_gather.intra_node_bytes > 0
        assert sum(one.reduced_inter_node_bytes for one in modules) == total.reduce_scatter.inter_node_bytes > 0
        assert sum(one.reduced_intra_node_bytes for one in modules) == total.reduce_scatter.intra_node_bytes > 0
        assert sum(one.gathers for one in modules) == total.all_gather.calls
        assert [one.reduces for one in modules] == [2, 2, 2]
        assert "0: weights as the group, gradients as the group, 175 of 5075 elements" in str(compression)

    run(body, 4, nodes=NODES, options=options())


@pytest.mark.parametrize("used", [False, True])
def test_a_line_tells_of_parameters_that_settings_miss(used: bool) -> None:
    """Those of a part that is no unit of fully_shard have the settings of the unit that gathers them."""

    def body() -> list[str]:
        lines, model = logged(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].requires_grad_(False)
        for part in (model[0], model):
            fully_shard(part)
        compress(model)
        if used:
            model(torch.ones(1, 8))
        compression = compress(model[1], weights="exact")
        model(torch.ones(1, 8))
        assert not compression.stats()
        return lines

    for lines in run(body, 2, options=options()):
        (line,) = [line for line in lines if "compress" in line]
        assert "2 parameters of the Linear have the settings of FSDPSequential" in line, line


def test_modules_have_their_names_in_the_largest_model_that_was_seen() -> None:
    def body() -> None:
        model = sharded()
        parts = [compress(block) for block in (model[0], model[1])]
        assert [list(part.stats()) for part in parts] == [["FSDPBlock"], ["FSDPBlock"]]
        assert list(compress(model).stats()) == ["0", "1", "2"]
        assert list(compress(model[0]).stats()) == ["0"]

    run(body, 2, options=options())


def test_the_report_names_parameters() -> None:
    def body() -> None:
        model = sharded()
        compress(model, exempt=[one_dimensional, "0.up.weight"])
        model(batch()).square().sum().backward()
        dist.barrier()
        made = report_of(backend_of(None))
        wanted = {"0.down.weight", "1.up.weight", "1.down.weight", "2.weight"}
        assert {site.site for site in made.all_gather} == {site.site for site in made.reduce_scatter} == wanted

    run(body, 2, options=options(), env=sampling())


def test_frozen_parameters_and_accumulated_gradients() -> None:
    """LoRA: what has no gradient is not in the message; gradients of several backward passes are reduced once."""

    def body() -> None:
        results = []
        for with_rule in (False, True):
            model = sharded()
            for block in (model[0], model[1]):
                block.up.requires_grad_(False)
                block.norm.weight.requires_grad_(False)
            if with_rule:
                compress(model, weights="exact", gradients="exact/int8:32", exempt=["*.bias", "*.norm.*"])
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(batch()).square().sum().backward()
            results.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
        exact, mixed = results
        assert exact.keys() == mixed.keys()
        for name, gradient in exact.items():
            if name.endswith("bias"):
                assert_same_bits(gradient, mixed[name])  # the sum of two does not depend on who adds
            else:
                assert not torch.equal(gradient, mixed[name])
                assert float((gradient - mixed[name]).abs().max()) <= float(gradient.abs().max()) / 50

    run(body, 2, nodes=[0, 1], options=options(all_gather="exact", reduce_scatter="exact"))


def test_gradients_of_some_parameters_only_are_left_exact_and_named() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(WIDTH, WIDTH)
            self.unused = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(inputs)
            return result

    def body() -> None:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zcomm").addHandler(handler)
        gradients = []
        for exact in (True, False):
            model = Unused()
            torch.manual_seed(0)
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            fully_shard(model)
            if not exact:
                compress(model, weights="exact")
            with zcomm.override(reduce_scatter="exact") if exact else zcomm.override():
                for _ in range(2):
                    model(batch()).square().sum().backward()
            gradients.append(model.used.weight.grad.to_local())
        assert_same_bits(*gradients)
        counted = zcomm.stats().reduce_scatter
        assert counted.calls == 0 and counted.exact["layout"].calls == 2
        assert len(records) == 1 and "Unused has gradients for some of its parameters only" in records[0]
        with (
            zcomm.override(strict=True),
            pytest.raises(RuntimeError, match=r"strict=True, but .*Unused has gradients for some"),
        ):
            model(batch()).square().sum().backward()

    run(body, 2, options=options(all_gather="exact"))


@pytest.mark.parametrize("feedback", [False, True])
def test_ranks_that_use_different_experts_are_told_both_calls(feedback: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, inputs: torch.Tensor, used: int) -> torch.Tensor:
            return functools.reduce(torch.add, [expert(inputs) for expert in self.experts[:used]])

    def body() -> str:
        model = Experts()
        fully_shard(model)
        compress(model, error_feedback=zcomm.codec.ErrorFeedback() if feedback else None)
        for used in (3, 2):  # all of them, then some, the same on all ranks
            model(batch(), used).square().sum().backward()
        with pytest.raises(RuntimeError, match="in FSDPExperts: ranks called different things") as raised:
            model(batch(), 1 + dist.get_rank()).square().sum().backward()
        return str(raised.value)

    for message in run(body, 2, nodes=[0, 1], options=options()):
        one, other = sorted(map(int, re.findall(r"reduce_scatter float32\[2 x (\d+)\]", message)))
        assert other == 2 * one, message


def test_shards_of_a_smaller_mesh_after_the_forward_pass() -> None:
    def body() -> None:
        model = sharded(reshard_after_forward=2)
        compression = compress(model, weights="int8:32", gradients="exact")
        model(batch()).square().sum().backward()
        assert [one.gathers for one in compression.stats().values()] == [2, 2, 2]  # the second among two ranks

    run(body, 4, nodes=NODES, options=options())


def test_wrong_arguments() -> None:
    def body() -> None:
        model = sharded()
        for arguments, message in [
            ({"weights": "int5:32"}, "^weights: .* got 'int5:32'"),
            ({"gradients": "int8"}, "^gradients: .* got 'int8'"),
            ({"exempt": "*.norm.*"}, "exempt: expected a sequence .* got '\\*.norm.\\*'"),
            ({"exempt": ["*.nrom.*"]}, "exempt: '\\*.nrom.\\*' selects no parameter"),
            ({"exempt": [nn.Conv2d]}, "exempt: <class .*Conv2d'> selects no parameter"),
            ({"exempt": [3]}, "exempt: expected a pattern, a type of module, or a function, got 3"),
            ({"exempt": [model[0]]}, "exempt: expected a pattern, a type of module, or a function, got FSDPBlock"),
            ({"error_feedback": True}, r"error_feedback: expected zcomm.feedback.ErrorFeedback \| None, got True"),
            ({"keep_in_node": "no"}, "keep_in_node: expected bool, got 'no'"),
            ({"max_bytes": "1GB"}, r"max_bytes: expected int \| None, got '1GB'"),
            ({"max_bytes": True}, r"max_bytes: expected int \| None, got True"),
        ]:
            with pytest.raises((ValueError, TypeError), match=message):
                compress(model, **arguments)

    run(body, 2, options=options())


def test_exact_gathers_are_counted_until_other_settings_are_made() -> None:
    def body() -> None:
        layer = nn.Linear(300, 300)
        fully_shard(layer)
        for weights, gathers, plain in (("exact", 0, 1), ("int8:256", 1, 0), ("exact", 0, 1)):
            compression = compress(layer, weights=weights)
            layer(torch.ones(1, 300)).sum().backward()
            layer.reshard()
            (stats,) = compression.stats().values()
            assert (stats.gathers, stats.gathers_plain, stats.gathers_fused, stats.reduces_fused) == (
                gathers, plain, gathers, 1,
            )  # fmt: skip

    run(body, 2, options=options(), nodes=[0, 1])


@pytest.mark.parametrize("when", ["always", "auto"])
def test_exact_calls_are_counted_by_their_reason(when: Any) -> None:
    def reasons(layer: nn.Module, inputs: torch.Tensor, **settings: Any) -> dict[str, int]:
        fully_shard(layer)
        compress(layer, **settings)
        found = newly_counted(lambda: layer(inputs).abs().sum().backward())
        return {name: calls for name, calls in found.items() if name.startswith(("all_gather", "reduce_scatter"))}

    def both(reason: str) -> dict[str, int]:
        return {f"all_gather: {reason}": 1, f"reduce_scatter: {reason}": 1}

    def body() -> None:
        few, many = torch.ones(1, 8), torch.ones(1, 300)
        assert reasons(nn.Linear(8, 8), few) == both("min_bytes")
        assert reasons(nn.Linear(8, 8), few, weights="lossless", exempt=()) == both("min_bytes")
        mixed = nn.Linear(8, 8)  # FSDP2 gathers its dtypes as bytes
        mixed.frozen = nn.Parameter(torch.ones(8, dtype=torch.bfloat16), requires_grad=False)
        assert reasons(mixed, few) == both("min_bytes")
        assert reasons(nn.Linear(300, 300).double(), many.double()) == both("dtype")
        assert reasons(nn.Linear(300, 300), many, exempt=["*"]) == both("format_exact")
        assert reasons(nn.Linear(300, 300), many, weights="exact", gradients="exact") == both("format_exact")
        with zcomm.exact():
            assert reasons(nn.Linear(8, 8), few) == both("format_exact")
        assert zcomm.stats().rehearsals.calls == 0

    run(body, 2, options=zcomm.Options(compress=when, min_bytes=1 << 12), nodes=[0, 1])


def test_the_codec_takes_a_ranks_own_part_of_a_parameter() -> None:
    def body() -> None:
        (weight,) = fully_shard(nn.Linear(64, 64, bias=False)).parameters()
        with pytest.raises(ValueError, match=r"got a DTensor: pass \w+\.to_local\(\)"):
            zcomm.codec.encode(weight, "int8:32")
        zcomm.codec.encode(weight.to_local(), "int8:32")

    run(body)


def test_of_a_unit_of_two_dtypes_the_one_with_more_bytes_is_compressed() -> None:
    def body() -> None:
        frozen = nn.Linear(256, 256, bias=False).bfloat16().requires_grad_(False)
        model: Any = nn.Sequential(frozen, nn.Linear(256, 8, bias=False))
        fully_shard(model)
        zcomm.fsdp.compress(model, weights="int8:256", exempt=())
        model.unshard()
        assert 256 * 256 // 2 < zcomm.stats().all_gather.wire_bytes < 256 * 256 // 2 * 1.5 + 256 * 8 * 4

    run(body, 2, nodes=[0, 1], options=options(min_bytes=1))


def test_a_unit_of_two_dtypes_that_stays_exact_goes_out_as_fsdp2_has_it() -> None:
    """A gather of bytes, which torch or a user's own gather carries out."""

    def body() -> None:
        frozen = nn.Linear(256, 256, bias=False).bfloat16().requires_grad_(False)
        model: Any = nn.Sequential(frozen, nn.Linear(256, 8, bias=False))
        fully_shard(model)
        compress(model, weights="int8:256", exempt=())
        (group,) = _fsdp2.groups_of(model)
        owner = _fsdp2.owner_of(group)
        plain, dtypes = owner.previous_gather, []

        class Recorded(type(plain)):  # type: ignore[misc]
            def __call__(self, output: torch.Tensor, shard: torch.Tensor, *arguments: Any) -> Any:
                dtypes.extend([output.dtype, shard.dtype])
                return plain(output, shard, *arguments)

        owner.previous_gather = Recorded()
        with zcomm.exact():
            model.unshard()
        assert dtypes == [torch.uint8, torch.uint8]

    run(body, 2, nodes=[0, 1], options=options(min_bytes=1))
