"""zcomm.register_hook and ZCOMM_LOG=debug: what functions of users see, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, OPT_INS, data, gather, logged, mine, scatter
from support.expected import assert_same_bits
from support.worlds import collect, run
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm.distributed import hooks

OPTIONS = zcomm.Options(min_bytes=1, **OPT_INS)


def recorded(**fields: Any) -> list[tuple[str, str, str]]:
    """Phases, collectives and verdicts of all calls from now on."""
    seen: list[tuple[str, str, str]] = []
    zcomm.register_hook(
        pre=lambda call: seen.append(("pre", call.collective, call.verdict)),
        post=lambda call, work: seen.append(("post", call.collective, call.verdict)),
        **fields,
    )
    return seen


def every_call() -> None:
    rank, values = dist.get_rank(), mine()
    gather(values)
    scatter(data(rank, 2 * NUM))
    dist.all_reduce(torch.ones(NUM, dtype=torch.int64))
    dist.reduce(torch.ones(3), 0)
    dist.barrier()
    dist.broadcast(values, 0)
    dist.all_to_all_single(torch.empty(NUM), torch.ones(NUM))
    dist.all_gather_coalesced([[torch.empty(3)], [torch.empty(3)]], [torch.ones(3)])
    with dist._coalescing_manager(async_ops=True):
        dist.all_reduce(torch.ones(NUM))
        dist.all_reduce(torch.ones(NUM, dtype=torch.int32))
    if rank == 0:
        dist.send(values, 1)
        dist.recv(values, 1)
        dist.recv(values)
    else:
        dist.recv(values, 0)
        dist.send(values, 0)
        dist.send(values, 0)


def test_each_call_is_seen_before_and_after_with_its_verdict() -> None:
    def body() -> None:
        seen = recorded()
        every_call()
        assert [one[1:] for one in seen[::2]] == [one[1:] for one in seen[1::2]]
        assert {phase for phase, *_ in seen[::2]} == {"pre"} and {phase for phase, *_ in seen[1::2]} == {"post"}
        calls = [(collective, verdict) for phase, collective, verdict in seen if phase == "pre"]
        messages = ["send", "recv", "recv"] if dist.get_rank() == 0 else ["recv", "send", "send"]
        assert calls == [
            ("_all_gather_base", "compressed"),
            ("_reduce_scatter_base", "compressed"),
            ("all_reduce", "not_a_float"),
            ("reduce", "other"),
            ("all_reduce_barrier", "other"),
            ("broadcast", "compressed"),
            ("all_to_all", "compressed"),
            ("all_gather_into_tensor_coalesced", "other"),
            ("all_reduce", "compressed"),
            ("allreduce_coalesced", "not_a_float"),
            *((message, "compressed") for message in messages),
        ]

    run(body, options=OPTIONS)


def test_a_call_shows_its_tensors_and_bytes() -> None:
    def body() -> None:
        calls: list[Any] = []
        works: list[Any] = []
        hook = zcomm.register_hook(pre=calls.append, post=lambda call, work: works.append(work))
        whole, shard = torch.empty(2 * NUM), mine()
        dist.all_gather_into_tensor(whole, shard)
        hook.remove()
        hook.remove()
        dist.barrier()
        (call,), (work,) = calls, works
        assert work.is_completed() and work.is_success()
        assert call.inputs[0].data_ptr() == shard.data_ptr() and call.outputs[0].data_ptr() == whole.data_ptr()
        assert call.group == dist.group.WORLD.group_name
        assert call.description == f"float32[2 x {NUM}] int8:256" and call.site == ""
        assert call.intra_node_bytes == 0
        assert (
            call.inter_node_bytes
            == zcomm.stats().all_gather.inter_node_bytes
            == zcomm.codec.wire_bytes("int8:256", "float32", NUM)
        )

    run(body, nodes=[0, 1], options=zcomm.Options(forms="out_of_place"))


def test_rehearsals_are_not_seen() -> None:
    def body() -> None:
        seen = recorded()
        for _ in range(3):
            gather(mine())
        stats = zcomm.stats()
        assert stats.rehearsals.calls > 0
        assert len(seen) == 2 * 3 and {collective for _, collective, _ in seen} == {"_all_gather_base"}

    run(body, nodes=[0, 1], options=zcomm.Options(compress="auto", min_bytes=1))


def test_calls_of_fsdp2_name_their_modules() -> None:
    def body() -> None:
        calls: list[Any] = []
        zcomm.register_hook(pre=calls.append)
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(3):
            model(torch.ones(4, 256)).sum().backward()
        stats = zcomm.stats()
        compressed = [call for call in calls if call.verdict == "compressed"]
        assert len(compressed) == stats.all_gather.calls + stats.reduce_scatter.calls > 0
        assert {call.site for call in compressed if call.inputs} >= {"0", "1"}

    run(body, nodes=[0, 1])


def test_an_error_before_a_call_is_that_of_the_call_and_moves_nothing() -> None:
    def check_for_nan(call: Any) -> None:
        for tensor in call.inputs:
            if tensor.is_floating_point() and tensor.isnan().any():
                raise FloatingPointError(f"{call.collective} sends NaN")

    def body() -> None:
        hook = zcomm.register_hook(pre=check_for_nan)
        for is_compressed in (True, False):
            for call in (gather, scatter, dist.all_reduce):
                values = mine(2 * NUM)
                with zcomm.override() if is_compressed else zcomm.exact():
                    call(values)
                    before = zcomm.stats()
                    values[3] = float("nan")
                    with pytest.raises(FloatingPointError, match="sends NaN"):
                        call(values)
                after = zcomm.stats()
                for name in ("all_gather", "reduce_scatter", "all_reduce"):
                    assert getattr(after, name).wire_bytes == getattr(before, name).wire_bytes
        hook.remove()
        whole = gather(torch.full([NUM], float("nan")))
        assert bool(whole.isnan().all())

    run(body, options=OPTIONS)


def test_hooks_of_one_group_see_no_other() -> None:
    def body() -> None:
        group = dist.new_group()
        seen = recorded(group=group)
        dist.all_reduce(torch.ones(3))
        assert not seen
        dist.all_reduce(torch.ones(3), group=group)
        assert len(seen) == 2

    run(body)


def test_the_first_error_of_a_group_is_told_once() -> None:
    def body() -> list[tuple[str, str]]:
        told: list[tuple[str, str]] = []
        zcomm.register_hook(abort=lambda *given: told.append(given))
        gather(mine())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                gather(mine())
        return told

    first, killed = collect(body, options=OPTIONS)
    assert killed.exit_code == -signal.SIGKILL
    ((group, error),) = first.value
    assert group == "0" and "lost rank 1" in error


def test_options_that_differ_and_messages_that_differ_are_told() -> None:
    def options_that_differ() -> list[str]:
        told: list[str] = []
        zcomm.register_hook(abort=lambda group, error: told.append(error))
        options = zcomm.Options(all_gather="int8:128" if dist.get_rank() else "int8:64", min_bytes=1)
        with contextlib.suppress(RuntimeError):
            gather(mine(), group=dist.new_group(pg_options=options))
        return told

    for told in run(options_that_differ):
        assert len(told) == 1 and "ranks disagree on the options" in told[0]

    def messages_that_differ() -> list[str]:
        told: list[str] = []
        zcomm.register_hook(abort=lambda group, error: told.append(error))
        with contextlib.suppress(RuntimeError):
            if dist.get_rank() == 0:
                dist.send(mine(), 1)
                dist.recv(mine(), 1)
            else:
                with zcomm.exact():
                    dist.recv(mine(), 0)
        return told

    for outcome in collect(messages_that_differ, options=OPTIONS, group_seconds=5):
        assert outcome.finished and any("Float exact" in error for error in outcome.value)


def test_an_error_in_what_sees_errors_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        def fails(group: str, error: str) -> None:
            raise LookupError("the hook's own")

        zcomm.register_hook(abort=fails)
        sys.unraisablehook = sys.__unraisablehook__  # not pytest's
        dist.group.WORLD.abort()

    collect(body, options=OPTIONS)
    assert "the hook's own" in capfd.readouterr().err


def test_results_are_those_without_hooks() -> None:
    def body() -> None:
        values = mine()
        plain = gather(values)
        recorded()
        assert_same_bits(gather(values), plain, "with hooks")

    run(body, options=OPTIONS)


def test_debug_logs_a_line_for_each_call() -> None:
    def body() -> list[str]:
        logging.getLogger("zcomm").setLevel(logging.DEBUG)
        lines = logged()
        hooks.log_calls()
        whole = torch.empty(2 * NUM)
        dist.all_gather_into_tensor(whole, mine(), async_op=True).wait()
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        return lines

    for lines in run(body, nodes=[0, 1], options=zcomm.Options(forms="out_of_place")):
        gathered, reduced, barrier = lines
        num_bytes = zcomm.codec.wire_bytes("int8:256", "float32", NUM)
        assert gathered.startswith(
            f"group '0' _all_gather_base: compressed float32[2 x {NUM}] int8:256, "
            f"sends 0 bytes in the node and {num_bytes} to others, "
        )
        assert reduced.startswith("group '0' all_reduce: exact (format_exact) 3 torch.float32, ")
        assert barrier.startswith("group '0' all_reduce_barrier: exact (other), ")
        assert all(line.endswith(" ms") for line in lines)


def test_debug_logs_that_a_call_failed() -> None:
    def body() -> list[str]:
        logging.getLogger("zcomm").setLevel(logging.DEBUG)
        gather(mine())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hooks.log_calls()
        lines = logged()
        with pytest.raises(RuntimeError):
            gather(mine())
        return lines

    lines = collect(body, options=OPTIONS)[0].value
    assert any(line.startswith("group '0' failed: ") and "lost rank 1" in line for line in lines)
    assert any("_all_gather_base: compressed" in line and ", failed after " in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({}, ValueError, "pre, post, abort: expected at least one function, got none"),
        ({"pre": 3}, TypeError, "pre: expected a function, got int"),
    ],
)
def test_wrong_functions_are_refused(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zcomm.register_hook(**fields)
