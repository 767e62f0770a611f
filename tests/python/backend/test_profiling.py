"""Compressed calls in traces of torch.profiler: each is there once, with the fields that Kineto, HTA and Chakra read,
and the bytes that zcomm.stats() counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.calls import NUM, call_each_form, gather, gather_in_place, gathered, mine, start_gather
from support.expected import assert_same_bits
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import zcomm

SENT = ("intra_node_bytes", "inter_node_bytes")
NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}


def traced(call: Callable[[], Any], **fields: Any) -> list[dict[str, Any]]:
    """The events of the exported trace of ``call()``."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, **fields) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events: list[dict[str, Any]] = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        return events


def communication(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["args"] for event in events if event["name"] == "record_param_comms"]


def train_one_step(model: nn.Module) -> None:
    model(torch.ones(4, 256)).sum().backward()


def trace_of_training() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    for module in (*model, model):
        fully_shard(module)
    train_one_step(model)  # connects the ranks
    before = zcomm.stats()
    events = traced(lambda: train_one_step(model))
    after = zcomm.stats()
    calls = communication(events)
    for collective, name in NAMES.items():
        of_this = [call for call in calls if call["Collective name"] == name]
        was, now = getattr(before, collective), getattr(after, collective)
        assert len(of_this) == now.calls - was.calls > 0
        whole = sum(max(call["In msg nelems"], call["Out msg nelems"]) for call in of_this)
        assert 4 * whole == now.bytes - was.bytes
        sent = [sum(call[f"Wire bytes {link}"] for call in of_this) for link in ("intra-node", "inter-node")]
        assert sent == [getattr(now, field) - getattr(was, field) for field in SENT]
        assert sum(sent) > 0
        for call in of_this:
            assert call["Group size"] == 2 and call["dtype"] == "Float"
            assert call["In msg nelems"] != call["Out msg nelems"]
            assert json.loads(call["Process Group Ranks"]) == [0, 1]
            assert call["Process Group Name"] == dist.group.WORLD.group_name  # type: ignore[union-attr]
            assert call["Process Group Description"] == "default_pg"
            assert call["zcomm plan"].startswith(collective)
    assert len(calls) == sum(getattr(after, c).calls - getattr(before, c).calls for c in NAMES)


def test_each_call_of_a_training_step_is_there_with_its_bytes() -> None:
    run(trace_of_training)
    run(trace_of_training, 2, nodes=[0, 1])


def forms() -> None:
    call_each_form()
    with zcomm.override(all_gather="int4:32"):
        gather(mine(dtype=torch.bfloat16))
    with zcomm.exact():
        gather(mine())
    dist.broadcast(mine(), 0)


def test_names_sizes_and_types_are_torchs_own() -> None:
    """Checks the calls that zcomm carries out; Gloo's calls have Gloo's names."""
    opted_in = options(forms="in_place,list", all_reduce="int8:128")
    found = [
        [
            (call["Collective name"], call["In msg nelems"], call["Out msg nelems"], call["dtype"], call["zcomm plan"])
            for call in calls
        ]
        for calls in run(lambda: communication(traced(forms)), options=opted_in)
    ]
    shape = f"float32[2 x {NUM}]"
    assert found[0] == found[1] == [
        ("_allgather_base", NUM, 2 * NUM, "Float", f"all_gather {shape} int8:256"),
        ("_reduce_scatter_base", 2 * NUM, NUM, "Float", f"reduce_scatter {shape} int8:128/int4:128"),
        ("allreduce", 2 * NUM, 2 * NUM, "Float", f"all_reduce float32[1 x {2 * NUM}] int8:128"),
        ("all_gather", NUM, 2 * NUM, "Float", f"all_gather {shape} int8:256"),
        ("reduce_scatter", 2 * NUM, NUM, "Float", f"reduce_scatter {shape} int8:128/int4:128"),
        ("_allgather_base", NUM, 2 * NUM, "BFloat16", f"all_gather bfloat16[2 x {NUM}] int4:32"),
    ]  # fmt: skip


def test_groups_have_their_own_names_and_ranks() -> None:
    def body() -> list[dict[str, Any]]:
        pairs = [dist.new_group(ranks, group_desc=f"pair {ranks[0]}") for ranks in ([0, 2], [1, 3])]
        return communication(traced(lambda: gather_in(pairs[dist.get_rank() % 2])))

    for rank, calls in enumerate(run(body, 4)):
        (call,) = calls
        assert json.loads(call["Process Group Ranks"]) == [rank % 2, rank % 2 + 2]
        assert call["Process Group Description"] == f"pair {rank % 2}"
        assert call["Group size"] == 2


def gather_in(group: Any) -> None:
    whole = torch.zeros(2 * NUM)
    gather_in_place(whole, group)


def ranges(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["name"].startswith("zcomm:")]


def test_encoding_transfer_and_decoding_are_ranges_within_the_call() -> None:
    def body() -> None:
        gather(mine())
        events = traced(lambda: gather(mine()))
        (event,) = [event for event in events if event["name"] == "record_param_comms"]
        names = {one["name"] for one in ranges(events)}
        assert names == {
            "zcomm:all_gather", "zcomm::encode", "zcomm::start_transfer", "zcomm::wait_for_transfer", "zcomm::decode"
        }  # fmt: skip
        assert all(one["tid"] == event["tid"] for one in ranges(events))
        encode, *_ = [event for event in events if event["name"] == "zcomm::encode"]
        assert event["ts"] <= encode["ts"] and encode["ts"] + encode["dur"] <= event["ts"] + event["dur"]

    run(body)


def test_a_profiler_may_end_while_an_asynchronous_call_is_under_way() -> None:
    """torch frees the memory of its events then: nothing of the call is written there afterwards."""

    def body() -> None:
        size = 1 << 20
        start_gather(0, size)[1].wait()
        for seed in range(10):
            works: list[Any] = []
            events = traced(lambda: works.extend(start_gather(seed, size) for _ in range(4)), with_stack=True)  # noqa: B023
            assert len(communication(events)) == 4 and not ranges(events)
            for _, work in works:
                work.wait()
            assert_same_bits(works[0][0], gathered(seed, size))

    run(body)


def test_execution_traces_have_the_calls(tmp_path: Path) -> None:
    """Chakra builds its graphs from these traces."""

    def body() -> None:
        path = str(tmp_path / f"{dist.get_rank()}.json")
        traced(lambda: gather(mine()), execution_trace_observer=ExecutionTraceObserver().register_callback(path))

    run(body)
    for rank in range(2):
        nodes = json.loads((tmp_path / f"{rank}.json").read_text())["nodes"]
        (call,) = [node for node in nodes if node["name"] == "record_param_comms"]
        attributes = {attribute["name"]: attribute["value"] for attribute in call["attrs"]}
        assert attributes["collective_name"] == "_allgather_base"
        assert attributes["in_msg_nelems"] == NUM and attributes["out_msg_nelems"] == 2 * NUM
        assert attributes["pg_size"] == 2 and attributes["pg_desc"] == "default_pg"
