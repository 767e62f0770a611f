"""What tells about calls on a GPU: traces, losses by telemetry, decisions of `compress="auto"`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu_world import Gather, ReduceScatter, assert_same_bits, run, synchronize, values
from support.worlds import options, sampling
from torch.profiler import ProfilerActivity, profile

import zcomm
from zcomm.distributed.groups import backend_of

NUM = 5003  # less than telemetry takes at once: every call is sampled whole
LONG = 4_000_000_000  # cycles: two seconds or so


def trace_of(*calls: Any) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        for call in calls:
            call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events: list[dict[str, Any]] = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        return events


@pytest.mark.cuda_only
def test_a_trace_has_the_calls_with_their_bytes_and_the_kernels() -> None:
    def body() -> None:
        calls = [Gather(NUM), ReduceScatter(NUM)]
        for call in calls:
            call()
        synchronize()
        before = zcomm.stats()
        events = trace_of(*calls)
        after = zcomm.stats()
        recorded = [event["args"] for event in events if event["name"] == "record_param_comms"]
        assert [args["Collective name"] for args in recorded] == ["_allgather_base", "_reduce_scatter_base"]
        for args, name in zip(recorded, ("all_gather", "reduce_scatter"), strict=True):
            sent = getattr(after, name).intra_node_bytes - getattr(before, name).intra_node_bytes
            assert args["Wire bytes intra-node"] == sent > 0
        kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
        for part in ("encode_kernel", "decode_kernel", "sum_kernel", "nccl"):
            assert any(part in name for name in kernels), (part, kernels)

    run(body, 2)


@pytest.mark.cuda_only
def test_losses_are_those_of_the_same_call_on_the_host() -> None:
    """And measuring them makes the host wait for nothing."""

    def totals() -> dict[str, float]:
        rows = backend_of().quantization_errors()
        names = ("elements", "finite_blocks", "nonzero", "zeroed", "signal", "noise", "block_errors")
        return {name: sum(row[name] for row in rows) for name in names}

    def body() -> None:
        gather = Gather(NUM)
        gather()
        gather.check()
        first = totals()
        assert first["signal"] > first["noise"] > 0
        torch.cuda._sleep(LONG)
        gather()
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        assert totals() == {name: 2 * total for name, total in first.items()}
        whole = torch.empty(2 * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM].copy_(values(NUM))
        with zcomm.override(forms="in_place"):
            dist.all_gather_into_tensor(whole, own)
        bound = 2.0**-53 * NUM * 4  # sums of terms of one sign, however they are ordered
        assert totals() == pytest.approx({name: 3 * total for name, total in first.items()}, rel=bound, abs=0)

    run(body, 2, env=sampling())


def test_a_policy_decides_once_and_the_result_is_that_of_the_decision() -> None:
    def body() -> Any:
        gather = Gather(NUM)
        gather()
        (decision,) = zcomm.stats().decisions
        assert decision.rounds > 0 and decision.exact_seconds > 0 and decision.compressed_seconds > 0
        rehearsals = zcomm.stats().rehearsals.calls
        assert rehearsals == 2 * (decision.rounds + 1)
        for seed in (1, 2):
            gather.set(seed)
            gather()
            if decision.compressed:
                gather.check()
            else:
                synchronize()
                exact = torch.cat([values(NUM, seed=seed, rank=rank) for rank in range(2)])
                assert_same_bits(gather.whole.cpu(), exact, seed)
        assert zcomm.stats().rehearsals.calls == rehearsals and zcomm.stats().decisions == [decision]
        return decision

    first, second = run(body, 2, options=options(compress="auto"))
    assert first == second
