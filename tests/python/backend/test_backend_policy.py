"""Nothing is compressed by surprise: which calls are, which are not and why, and how contexts change it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import (
    NUM,
    OPT_INS,
    data,
    expect,
    gather,
    gather_list,
    mine,
    newly_counted,
    scatter,
)
from support.expected import assert_same_bits
from support.worlds import options, run
from torch.distributed import _functional_collectives as functional

import zcomm


def gather_own_weights() -> None:
    whole = mine(2 * NUM)
    dist.all_gather_single(whole, whole.chunk(2)[dist.get_rank()])


def gather_out_of_place() -> None:
    dist.all_gather_single(torch.empty(2 * NUM), mine())


def gather_functional() -> None:
    functional.all_gather_tensor(mine(), 0, dist.group.WORLD).sum()


def gather_coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_gather_single(torch.empty(2 * NUM), mine())
        dist.all_gather_single(torch.empty(2 * NUM), mine())


def scatter_unmarked() -> None:
    dist.reduce_scatter_single(torch.empty(NUM), mine(2 * NUM))


def gather_list_in_place() -> None:
    slots = list(mine(2 * NUM).chunk(2))
    dist.all_gather(slots, slots[dist.get_rank()])


def gather_coalesced_in_place() -> None:
    whole = mine(2 * NUM)
    with dist._coalescing_manager():
        dist.all_gather_single(whole, whole.chunk(2)[dist.get_rank()])


def scatter_list() -> None:
    dist.reduce_scatter(torch.empty(NUM), list(mine(2 * NUM).chunk(2)))


def scatter_functional() -> None:
    functional.reduce_scatter_tensor(mine(2 * NUM), "avg", 0, dist.group.WORLD).sum()


def reduce_all() -> None:
    dist.all_reduce(mine())


def reduce_all_coalesced() -> None:
    dist.all_reduce_coalesced([mine(), mine()])


# Call -> what is counted by default, and with every opt-in.
TABLE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "all-gather of copies": (lambda: gather(mine()), "all_gather: compressed", ""),
    "of bfloat16": (lambda: gather(mine(dtype=torch.bfloat16)), "all_gather: compressed", ""),
    "of float16": (lambda: gather(mine(dtype=torch.float16)), "all_gather: compressed", ""),
    "FSDP2's reduce-scatter": (
        lambda: scatter(mine(2 * NUM), dist.ReduceOp.AVG),
        "reduce_scatter: compressed",
        "",
    ),
    "reduce-scatter of who knows what": (
        scatter_unmarked,
        "reduce_scatter: unmarked",
        "reduce_scatter: compressed",
    ),
    "reduce-scatter SUM": (lambda: scatter(mine(2 * NUM)), "reduce_scatter: compressed", ""),
    "reduce-scatter PREMUL_SUM": (
        lambda: scatter(mine(2 * NUM), dist._make_nccl_premul_sum(0.5)),
        "reduce_scatter: compressed",
        "",
    ),
    "all-gather, small": (lambda: gather(mine(8191)), "all_gather: min_bytes", ""),
    "all-gather, just large enough": (lambda: gather(mine(8192)), "all_gather: compressed", ""),
    "reduce-scatter, small": (lambda: scatter(mine(16382)), "reduce_scatter: min_bytes", ""),
    "all-gather, in place": (gather_own_weights, "all_gather: in_place", "all_gather: compressed"),
    "all-gather, out of place": (gather_out_of_place, "all_gather: out_of_place", "all_gather: compressed"),
    "all-gather, list": (gather_list, "all_gather: form", "all_gather: compressed"),
    "all-gather, functional": (gather_functional, "all_gather: form", "all_gather: compressed"),
    "all-gather, coalesced": (gather_coalesced, "all_gather: form 2", "all_gather: compressed 2"),
    "all-gather, list in place": (gather_list_in_place, "all_gather: form", "all_gather: compressed"),
    "all-gather, coalesced in place": (gather_coalesced_in_place, "all_gather: form", "all_gather: compressed"),
    "reduce-scatter, list": (scatter_list, "reduce_scatter: form", "reduce_scatter: compressed"),
    "reduce-scatter, functional": (scatter_functional, "reduce_scatter: form", "reduce_scatter: compressed"),
    "all-reduce": (reduce_all, "all_reduce: format_exact", "all_reduce: compressed"),
    "all-reduce, coalesced": (reduce_all_coalesced, "all_reduce: format_exact 2", "all_reduce: compressed 2"),
    "reduce-scatter MAX": (lambda: scatter(mine(2 * NUM), dist.ReduceOp.MAX), "reduce_scatter: operation", ""),
    "broadcast": (lambda: dist.broadcast(mine(), 0), "broadcast: format_exact", "broadcast: compressed"),
    "reduce": (lambda: dist.reduce(mine(), 0), "others", ""),
    "all-to-all": (
        lambda: dist.all_to_all_single(torch.empty(NUM), mine()),
        "all_to_all: format_exact",
        "all_to_all: compressed",
    ),
    "barrier": (lambda: dist.barrier(), "others", ""),
}


@pytest.mark.promise(7)
@pytest.mark.parametrize("opted_in", [False, True], ids=["default", "every opt-in"])
def test_the_table_of_what_is_compressed(opted_in: bool) -> None:
    """Each call is compressed where the table says so, and else counted with the reason."""

    def body() -> list[str]:
        wrong = []
        for name, (call, default, with_opt_ins) in TABLE.items():
            text = (opted_in and with_opt_ins) or default
            reason, number = (text[:-2], int(text[-1])) if text[-1].isdigit() else (text, 1)
            if (got := newly_counted(call)) != {reason: number}:
                wrong.append(f"{name}: want {reason} {number}, got {got}")
        return wrong

    assert run(body, options=zcomm.Options(**OPT_INS) if opted_in else None) == [[], []]


EXACT_DTYPES = {
    "int64": "not_a_float",
    "int32": "not_a_float",
    "int8": "not_a_float",
    "uint8": "not_a_float",
    "bool": "not_a_float",
    "float64": "dtype",
    "complex64": "dtype",
    "complex128": "dtype",
}


@pytest.mark.promise(7)
@pytest.mark.parametrize("name", EXACT_DTYPES)
def test_other_dtypes_pass_bit_for_bit(name: str) -> None:
    """Integers, bool, uint8 (packed data), float64 and complex are never touched, whatever is opted in."""
    dtype = getattr(torch, name)

    def body() -> None:
        rank = dist.get_rank()
        shards = [data(r, NUM, torch.float64) + 1e-9 for r in range(2)]
        if dtype.is_complex:
            shards = [torch.complex(shard, -shard) for shard in shards]
        shards = [(shard * 100).to(dtype) for shard in shards]
        assert newly_counted(lambda: assert_same_bits(gather(shards[rank]), torch.cat(shards), "all_gather")) == {
            f"all_gather: {EXACT_DTYPES[name]}": 1
        }
        copied = [shards[0] if rank == 0 else torch.empty_like(shards[0])]
        dist.broadcast(copied[0], 0)
        assert_same_bits(copied[0], shards[0], "broadcast")
        if dtype in (torch.int64, torch.int32, torch.float64, torch.uint8):
            output = torch.empty(NUM // 2, dtype=dtype)
            reason = newly_counted(lambda: dist.reduce_scatter_single(output, shards[rank].clone()))
            assert reason == {f"reduce_scatter: {EXACT_DTYPES[name]}": 1}
            assert_same_bits(output, (shards[0] + shards[1])[rank * NUM // 2 :][: NUM // 2], "reduce_scatter")

    run(body, options=options(**OPT_INS))


def viewed(*parts: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack(parts, -1))


@pytest.mark.promise(7)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode], ids=["", "inference"])
@pytest.mark.parametrize("make", [torch.complex, viewed], ids=["complex", "view"])
def test_complex_tensors_stay_exact(make: Any, mode: Any) -> None:
    """torch hands over real views of them, however they were made. Other tensors are compressed."""

    def body() -> None:
        with mode():
            calls()

    def calls() -> None:
        rank = dist.get_rank()
        shards = [make(data(r, NUM), -data(r, NUM)) for r in range(2)]
        call = lambda: assert_same_bits(gather(shards[rank]), torch.cat(shards))  # noqa: E731
        assert newly_counted(call) == {"all_gather: dtype": 1}
        assert newly_counted(lambda: dist.all_reduce(shards[rank])) == {"all_reduce: dtype": 1}
        assert newly_counted(lambda: gather(mine())) == {"all_gather: compressed": 1}

    run(body, options=options(**OPT_INS))


def test_one_rank_moves_nothing() -> None:
    """A world of one counts single_rank and keeps the values."""

    def body() -> None:
        values = mine()
        assert newly_counted(lambda: assert_same_bits(gather(values), values)) == {"all_gather: single_rank": 1}
        assert_same_bits(scatter(values), values)

    run(body, 1, options=options())


def test_tensors_that_are_not_contiguous_go_exact() -> None:
    """Such calls are counted under layout, and are correct to the last bit."""

    def body() -> None:
        rank = dist.get_rank()
        want = (data(0, NUM) + data(1, NUM)).view(128, -1)
        transposed = data(rank, NUM).view(128, -1).t().contiguous().t()
        assert not transposed.is_contiguous()
        assert newly_counted(lambda: dist.all_reduce(transposed)) == {"all_reduce: layout": 1}
        assert_same_bits(transposed.contiguous(), want)

    run(body, options=options(**OPT_INS))


def test_layouts_that_gloo_gets_wrong_are_refused() -> None:
    """gloo ignores the strides of such tensors; the group stays usable."""

    def body() -> None:
        values, strided, turned = torch.ones(2 * NUM), torch.ones(4 * NUM)[::2], torch.ones(NUM, 2).t()
        table, is_root = values.view(2, -1), dist.get_rank() == 0
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("tensor: expected values without gaps", lambda: dist.all_reduce(strided)),
            ("tensor: expected values without gaps", lambda: dist.broadcast(strided, 0)),
            ("tensor: expected values without gaps", lambda: dist.reduce(strided, 0)),
            ("output: expected a contiguous tensor", lambda: dist.all_to_all_single(strided, values)),
            ("tensor: expected a contiguous tensor", lambda: dist.scatter(turned, [table] * 2 if is_root else None)),
            ("output: expected a contiguous tensor", lambda: dist.reduce_scatter(turned, [table] * 2)),
        ]
        for text, call in wrong:
            expect(ValueError, text, call)
        dist.all_reduce(turned)
        assert_same_bits(turned, torch.full_like(turned, 2.0))

    run(body)


@pytest.mark.promise(8)
def test_strict_raises_before_any_byte_moves() -> None:
    """Only for large floating-point calls, naming the reason and the way out; the group stays usable."""

    def body() -> None:
        if dist.get_rank() == 0:  # the others do not even hear of it
            expect(RuntimeError, "forms='out_of_place'", gather_out_of_place)
            expect(RuntimeError, "forms='list'", gather_list)
            expect(RuntimeError, "forms='coalesced'", gather_functional)
            expect(RuntimeError, "'traced' those of compiled graphs", scatter_functional)
            expect(RuntimeError, "forms='in_place' compresses all-gathers in place", gather_own_weights)
            expect(RuntimeError, "float32, bfloat16 and float16", lambda: gather(mine(dtype=torch.float64)))
            expect(RuntimeError, "SUM, AVG and PREMUL_SUM", lambda: scatter(mine(2 * NUM), dist.ReduceOp.MAX))
            expect(RuntimeError, "forms='single' compresses reduce-scatters", scatter_unmarked)
            strided = torch.ones(NUM, 2)[:, 0]
            expect(RuntimeError, "contiguous", lambda: dist.reduce_scatter_single(strided, mine(2 * NUM)))
        assert newly_counted(lambda: gather(mine(8))) == {"all_gather: min_bytes": 1}
        assert newly_counted(lambda: gather(mine(dtype=torch.float64).long())) == {"all_gather: not_a_float": 1}
        assert newly_counted(reduce_all) == {"all_reduce: format_exact": 1}
        with zcomm.exact():
            assert newly_counted(gather_out_of_place) == {"all_gather: format_exact": 1}
        assert newly_counted(lambda: gather(mine())) == {"all_gather: compressed": 1}

    run(body, options=zcomm.Options(strict=True))


def test_exact_and_override_nest() -> None:
    """An inner block changes only what it names; each block ends at its end, by exception too."""

    def reason() -> str:
        return next(iter(newly_counted(lambda: gather(mine())))).removeprefix("all_gather: ")

    def body() -> None:
        with zcomm.exact():
            assert reason() == "format_exact"
            with zcomm.override(all_gather="int4:32"):
                assert reason() == "compressed"
                with zcomm.override(min_bytes=1 << 30):
                    assert reason() == "min_bytes"
                    assert newly_counted(lambda: scatter(mine(2 * NUM))) == {"reduce_scatter: format_exact": 1}
                assert reason() == "compressed"
            assert reason() == "format_exact"
        assert reason() == "compressed"
        with pytest.raises(KeyError), zcomm.exact():
            raise KeyError
        assert reason() == "compressed"
        again = zcomm.override(forms="in_place,out_of_place")
        for _ in range(2):
            with again, again:
                assert newly_counted(gather_out_of_place) == {"all_gather: compressed": 1}
        assert newly_counted(gather_out_of_place) == {"all_gather: out_of_place": 1}

    run(body)


def test_override_reaches_the_backward_pass_and_no_other_thread() -> None:
    """Autograd threads and hooks see the override in force around backward(), not the one around forward()."""

    def body() -> None:
        def loss() -> torch.Tensor:
            leaf = torch.ones(2, requires_grad=True)
            leaf.register_hook(lambda gradient: seen.append(newly_counted(lambda: gather(mine()))))
            return leaf.sum()

        def in_thread() -> None:
            seen.append(newly_counted(lambda: gather(mine())))

        seen: list[dict[str, int]] = []
        with zcomm.exact():
            forward = loss()
            loss().backward()
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
        forward.backward()
        compressed, exact = {"all_gather: compressed": 1}, {"all_gather: format_exact": 1}
        assert seen == [exact, compressed, compressed]

    run(body)


@pytest.mark.promise(9)
def test_wrong_tensors_are_refused_before_any_byte_moves() -> None:
    """ValueError on the rank that is wrong; the others hear nothing, and the group stays usable."""

    def body() -> None:
        rank, whole = dist.get_rank(), torch.empty(2 * NUM)
        own = whole[rank * NUM :][:NUM]
        wrong: dict[str, Callable[[], Any]] = {
            "output: expected 2 times": lambda: dist.all_gather_single(torch.empty(2 * NUM + 1), own),
            "output: expected dtype Float as in input, got BFloat16": lambda: dist.all_gather_single(
                torch.empty(2 * NUM, dtype=torch.bfloat16), own
            ),
            "input: expected 2 times": lambda: dist.reduce_scatter_single(torch.empty(NUM), torch.empty(2 * NUM - 2)),
            "output_tensors: expected a tensor for each of 2 ranks, got 3": lambda: dist.all_gather(
                [torch.empty(NUM)] * 3, own
            ),
            "as in input_tensor, got one of": lambda: dist.all_gather([torch.empty(NUM), torch.empty(NUM + 1)], own),
            "input_list: expected a tensor for each of 2 ranks, got 3": lambda: dist.reduce_scatter(
                torch.empty(NUM), [own] * 3
            ),
        }
        for text, call in wrong.items() if rank == 1 else ():
            expect(ValueError, text, call)
        own.copy_(mine())
        dist.all_gather_single(whole, own)
        assert_same_bits(whole, gather(mine()))

    run(body, options=options(**OPT_INS))


@pytest.mark.promise(8)
def test_a_refused_call_is_not_counted() -> None:
    def body() -> None:
        call = lambda: expect(ValueError, "", lambda: dist.all_gather_single(torch.empty(9), torch.empty(4)))  # noqa: E731
        assert newly_counted(call) == {}

    run(body, options=options(**OPT_INS))
