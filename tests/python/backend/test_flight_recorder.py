"""Dumps of the flight recorder, read by torch's own analyzer: which rank did not come."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, call_each_form, gather, mine, scatter
from support.worlds import options, run
from torch.distributed.flight_recorder import fr_trace

import zcomm
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of

SOON = 2.0  # a group's timeout, where ranks wait for it
LATE = 2  # the rank that does not come
OTHERS = (0, 1, 3)


def analyze(caplog: pytest.LogCaptureFixture, folder: Path, *arguments: str) -> str:
    """Return the output of torchfrtrace."""
    caplog.clear()
    try:
        fr_trace.main([str(folder), *arguments])
    finally:
        gc.enable()  # torchfrtrace disables it
    return caplog.text


def exactly() -> None:
    dist.all_reduce(torch.ones(8))


@pytest.mark.parametrize("call", [lambda: gather(mine()), exactly], ids=["compressed", "exact"])
def test_the_analyzer_names_the_rank_that_did_not_come(
    call: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others write when they time out, the late one is asked to."""
    dumps = {rank: tmp_path / f"rank_{rank}" for rank in range(4)}

    def body() -> None:
        gather(mine())
        exactly()
        world: Any = dist.group.WORLD
        world.set_timeout(datetime.timedelta(seconds=SOON))
        if dist.get_rank() == LATE:
            assert zcomm.dump_flight_recorder(tmp_path / "rank_") == dumps[LATE]
            while not all(dumps[rank].exists() for rank in OTHERS):  # as if it hung
                time.sleep(0.05)
            return
        with pytest.raises(RuntimeError):
            call()

    run(body, 4, env={"ZCOMM_FLIGHT_RECORDER": str(tmp_path / "rank_")})
    said = analyze(caplog, tmp_path)
    assert "Not all ranks joining collective, sequence number: 3" in said
    assert f"missing ranks: {{{LATE}}}" in said
    dumps[LATE].unlink()  # as if it were dead
    assert f"missed FR dumps from ranks ({{{LATE}}})" in analyze(caplog, tmp_path, "--allow-incomplete-ranks")


def test_the_analyzer_finds_the_call_that_one_rank_alone_compresses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        gather(mine())
        world: Any = dist.group.WORLD
        world.set_timeout(datetime.timedelta(seconds=SOON))
        with zcomm.exact() if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(RuntimeError):
            gather(mine())

    run(body, env={"ZCOMM_FLIGHT_RECORDER": str(tmp_path / "rank_")})
    said = analyze(caplog, tmp_path)
    assert "Float compressed" in said and "does not match" in said


def messages() -> None:
    """Each way, with and without a tag; what was sent first is received last."""
    peer, tensors = 1 - dist.get_rank(), [torch.ones(8), torch.ones(4, dtype=torch.float64)]
    works: list[Any] = [dist.isend(tensor, peer, tag=tag) for tag, tensor in enumerate(tensors)]
    for tag in (1, 0):
        dist.recv(tensors[tag].clone(), peer, tag=tag)
    for work in works:
        work.wait()


def test_the_analyzer_names_the_rank_that_did_not_send(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Messages between others do not count as calls that it missed."""
    dump = tmp_path / "rank_1"

    def body() -> None:
        rank = dist.get_rank()
        for peer in (0, 3):
            if rank == LATE:
                dist.send(torch.ones(8), peer)
            elif rank == peer:
                dist.recv(torch.ones(8), LATE)
        if rank == 1:
            world: Any = dist.group.WORLD
            world.set_timeout(datetime.timedelta(seconds=SOON))
            with pytest.raises(RuntimeError):
                dist.recv(torch.ones(8), LATE)
            return
        while not dump.exists():  # as if it hung
            time.sleep(0.05)
        zcomm.dump_flight_recorder(tmp_path / "rank_")

    run(body, 4, env={"ZCOMM_FLIGHT_RECORDER": str(tmp_path / "rank_")})
    said = analyze(caplog, tmp_path)
    assert said.count("Not all ranks joining") == 1
    assert f"group info: 0 {LATE}->1:default_pg {LATE}->1" in said
    assert "collective: nccl:recv 0<-1" in said  # the two ranks of that group
    assert f"missing ranks: {{{LATE}}}" in said


def calls_of_all_kinds() -> None:
    call_each_form()
    messages()
    whole = mine(2 * NUM)
    with zcomm.exact():
        gather(mine())
        scatter(whole)
        dist.all_reduce(whole)
    dist.broadcast(whole, 0)
    dist.reduce(whole, 0)
    dist.gather(whole, [torch.empty_like(whole) for _ in range(2)] if dist.get_rank() == 0 else None)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.all_gather_object([None, None], "text")
    dist.barrier()


def test_the_analyzer_finds_nothing_wrong_with_calls_of_all_kinds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups are told apart, and the dump knows each of them."""

    def body() -> None:
        alone = [dist.new_group([rank], group_desc="alone") for rank in range(2)][dist.get_rank()]
        calls_of_all_kinds()
        dist.all_reduce(torch.ones(1), group=alone)
        zcomm.dump_flight_recorder(tmp_path / "rank_")

    run(body, options=options(forms="in_place,list", all_reduce="int8:128"))
    dump = pickle.loads((tmp_path / "rank_1").read_bytes())
    messages_of = {f"default_pg {way}{tag}": "[0, 1]" for way in ("0->1", "1->0") for tag in ("", " tag 1")}
    groups = {group["desc"]: group["ranks"] for group in dump["pg_config"].values()}
    assert groups == {"default_pg": "[0, 1]", "alone": "[1]", **messages_of}
    assert {entry["state"] for entry in dump["entries"]} == {"completed"}
    said = analyze(caplog, tmp_path)
    for wrong in ("Not all ranks", "has errors", "cannot decide", "mismatch"):
        assert wrong not in said


def test_the_last_calls_are_kept(tmp_path: Path) -> None:
    def body() -> list[int]:
        for _ in range(5):
            exactly()
        dump = pickle.loads(zcomm.dump_flight_recorder(tmp_path / "rank_").read_bytes())
        return [entry["collective_seq_id"] for entry in dump["entries"]]

    assert run(body, env={"TORCH_FR_BUFFER_SIZE": "3"}) == [[3, 4, 5]] * 2
    assert run(body, env={"TORCH_FR_BUFFER_SIZE": "0"}) == [[]] * 2


def test_tags_are_forgotten_with_their_messages(tmp_path: Path) -> None:
    """A program may have a new one for each message. The numbers of one that comes again start anew."""

    def body() -> list[int]:
        for tag in (*range(8), 1):
            send = dist.isend(torch.ones(1), 1 - dist.get_rank(), tag=tag)
            dist.recv(torch.ones(1), tag=tag, src=1 - dist.get_rank())
            send.wait()
        dump = pickle.loads(zcomm.dump_flight_recorder(tmp_path / "rank_").read_bytes())
        return [entry["collective_seq_id"] for entry in dump["entries"]]

    assert run(body, env={"TORCH_FR_BUFFER_SIZE": "2"}) == [[1, 1]] * 2
    assert run(body, env={"TORCH_FR_BUFFER_SIZE": "100"})[0][-2:] == [2, 2]


def test_a_call_that_is_refused_has_no_number(tmp_path: Path) -> None:
    """A number would make the analyzer compare later calls with different calls of other ranks."""

    def body() -> list[tuple[int, str, str]]:
        exactly()
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="invalid tensor size"):
                dist.all_gather([torch.ones(3), torch.ones(4)], torch.ones(3))
            with pytest.raises(RuntimeError, match="contiguous"):
                dist.send(torch.ones(4)[::2], 1)
        exactly()
        dist.send(torch.ones(4), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(4), 0)
        dump = pickle.loads(zcomm.dump_flight_recorder(tmp_path / "rank_").read_bytes())
        return [(entry["collective_seq_id"], entry["profiling_name"][:15], entry["state"]) for entry in dump["entries"]]

    first, second = run(body)
    sums = [(number, "nccl:all_reduce", "completed") for number in (1, 2)]
    assert first == [*sums, (1, "nccl:send 0->1", "completed")]
    assert second == [*sums, (1, "nccl:recv 1<-0", "completed")]


def test_a_number_of_calls_that_is_none_is_refused() -> None:
    """Before the ranks meet: rank 1 never comes."""

    def body() -> None:
        if os.environ["RANK"] == "1":
            return
        with pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE: expected an integer of at least 0, got '-1'"):
            dist.init_process_group("zcomm")

    run(body, env={"TORCH_FR_BUFFER_SIZE": "-1"}, backend=None, launched=True)


def test_a_gather_that_leaves_wires_is_recorded_with_the_dtype_of_its_values(tmp_path: Path) -> None:
    def body() -> None:
        own = torch.ones(NUM, dtype=torch.bfloat16)
        plan = backend_of().plan(torch.empty(2 * NUM, dtype=torch.bfloat16), own)
        assert isinstance(plan, _c10d.Operation)
        plan.run(None, own, wires=torch.empty(plan.wires_bytes, dtype=torch.uint8)).wait()
        entry = pickle.loads(zcomm.dump_flight_recorder(tmp_path / "rank_").read_bytes())["entries"][-1]
        assert (entry["output_dtypes"], entry["output_sizes"]) == (["BFloat16 compressed"], [[2 * NUM]])

    run(body, 2, options=options())


def test_a_path_that_blocks_delays_a_rank_and_does_not_stop_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A FIFO that nobody reads, as a file system that hangs: the call raises, and other groups of the process go on."""
    os.mkfifo(tmp_path / "rank_0")
    ended = tmp_path / "ended"

    def body() -> None:
        world: Any = dist.group.WORLD
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        if dist.get_rank() == 1:
            while not ended.exists():  # as if it hung: a rank that leaves fails the call before its timeout
                time.sleep(0.05)
            return
        world.set_timeout(datetime.timedelta(seconds=SOON))
        with pytest.raises(RuntimeError):
            exactly()
        dist.all_reduce(torch.ones(1), group=alone)
        assert pickle.loads(_c10d.flight_recorder_dump())["entries"]
        ended.touch()

    run(body, env={"ZCOMM_FLIGHT_RECORDER": str(tmp_path / "rank_")})
    assert f"expected a path that can be written within 5 s, got {tmp_path / 'rank_0'}" in capfd.readouterr().err


def test_a_call_of_a_plan_that_comes_after_the_end_leaves_no_record() -> None:
    def body() -> None:
        own = torch.ones(NUM)
        backend = backend_of()
        plan = backend.plan(torch.empty(2 * NUM), own)
        assert isinstance(plan, _c10d.Operation)
        plan.run(torch.empty(2 * NUM), own).wait()
        backend.shutdown()
        with pytest.raises(RuntimeError, match="the process group was shut down"):
            plan.run(torch.empty(2 * NUM), own)
        assert [entry["state"] for entry in pickle.loads(_c10d.flight_recorder_dump())["entries"]] == ["completed"]

    run(body, options=options(forms="in_place,out_of_place"))
