"""Whether processes can read each other's GPU memory by cudaIpc, what survives, and how long a meeting of ranks takes.

A process exports memory, another one opens it and reads a pattern; either closes first, or the exporter is killed.
Ranks meet in each other's memory by a kernel of one warp: as streams of one process, which run at the same time, and as
processes, which take turns on the GPU without MPS. Decoding from opened memory is compared with decoding from own
memory, which on one GPU is the same memory: what differs is the mapping. An outcome says what happened.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.one_gpu import probes, stage

SHARED = stage.pick(1 << 26, 1 << 21)  # bytes
DECODED = stage.pick(1 << 25, 1 << 14)  # elements
RANKS = (2, 3, 4)
PROCESSES = stage.pick(RANKS, (2,))
STREAM_ROUNDS, PROCESS_ROUNDS = stage.pick((2000, 50), (20, 20))
LIMIT_NS = 20_000_000_000  # of a round
PATIENCE = stage.pick(25.0, 100.0)  # with another process, seconds
SEED = 7
COLUMNS = ("what", "ranks", "us", "outcome")
CONTROL = 1 << 21  # bytes, of which arrivals, epoch and missing take few: what a handle opens, whole

Row = dict[str, Any]


class Meeting(ctypes.Structure):
    """As probes.hpp has it."""

    _fields_ = (
        ("theirs", ctypes.c_void_p * probes.MOST_RANKS),
        ("arrived", ctypes.c_void_p),
        ("epoch", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("rounds", ctypes.c_uint),
        ("limit_ns", ctypes.c_uint64),
    )


def allocate(num_bytes: int) -> int:
    data = ctypes.c_void_p()
    probes.call("malloc", ctypes.c_size_t(num_bytes), ctypes.byref(data))
    assert data.value is not None
    return data.value


def exported(data: int) -> bytes:
    handle = ctypes.create_string_buffer(64)
    probes.call("export", probes.address(data), handle)
    return handle.raw


def opened(handle: bytes) -> int:
    data = ctypes.c_void_p()
    probes.call("open", handle, ctypes.byref(data))
    assert data.value is not None
    return data.value


def num_differences(data: int, counter: int) -> int:
    found = ctypes.c_ulonglong()
    place = (probes.address(data), ctypes.c_int64(SHARED), SEED, probes.address(counter))
    probes.call("count_differences", *place, ctypes.byref(found))
    return found.value


def outcome(body: Callable[[], object]) -> str:
    """What `body` returns, or the error that it raises."""
    try:
        return str(body())
    except RuntimeError as error:
        return str(error)


def meeting(rank: int, controls: list[int], rounds: int) -> Meeting:
    """Of a rank that knows where all ranks' control words are for it."""
    own = controls[rank]
    behind = own + 4 * probes.MOST_RANKS * probes.WORDS_APART
    theirs = (ctypes.c_void_p * probes.MOST_RANKS)(*controls)
    return Meeting(theirs, own, behind, behind + 128, rank, len(controls), rounds, LIMIT_NS)


def missing(one: Meeting) -> int:
    """A bit for each rank that did not come."""
    word = ctypes.c_uint()
    probes.call("copy", ctypes.byref(word), probes.address(one.missing), ctypes.c_size_t(4))
    return word.value


def meet_on_streams(size: int) -> Iterator[Row]:
    controls = [allocate(CONTROL) for _ in range(size)]
    streams = [ctypes.c_void_p() for _ in range(size)]
    for stream in streams:
        probes.call("new_stream", ctypes.byref(stream))
    seconds = 0.0
    for rounds in (1, STREAM_ROUNDS):  # the first one loads the kernel
        ranks = [meeting(rank, controls, rounds) for rank in range(size)]
        start = time.perf_counter()
        for one, stream in zip(ranks, streams, strict=True):
            probes.call("meet", ctypes.byref(one), stream)
        probes.call("synchronize")
        seconds = time.perf_counter() - start
    late = any(missing(one) for one in ranks)
    for control in controls:
        probes.call("free", probes.address(control))
    met = "a rank did not come" if late else "met"
    yield {"what": "meeting, streams", "ranks": size, "us": seconds / STREAM_ROUNDS * 1e6, "outcome": met}


def receive(pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"the other process said nothing for {PATIENCE:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the other process has ended") from None


# What other processes do: each says something first, then waits for words.


def exporter(pipe: Any) -> None:
    """Exports a pattern; "free" frees it."""
    data = allocate(SHARED)
    probes.call("write_pattern", probes.address(data), ctypes.c_int64(SHARED), SEED)
    pipe.send(exported(data))
    while receive(pipe) == "free":
        pipe.send(outcome(lambda: probes.call("free", probes.address(data)) or "freed"))


def meeter(pipe: Any) -> None:
    """Meets ranks whose control words it opens."""
    own = allocate(CONTROL)
    pipe.send(exported(own))
    rank, handles = receive(pipe)
    controls = [own if peer == rank else opened(handle) for peer, handle in enumerate(handles)]
    for rounds in (1, PROCESS_ROUNDS):
        pipe.send("ready")
        receive(pipe)
        one = meeting(rank, controls, rounds)
        start = time.perf_counter()
        probes.call("meet", ctypes.byref(one), None)
        probes.call("synchronize")
        pipe.send((time.perf_counter() - start, missing(one)))
    for peer, control in enumerate(controls):
        if peer != rank:
            probes.call("close", probes.address(control))
    pipe.send("closed")
    receive(pipe)
    probes.call("free", probes.address(own))


@contextmanager
def started(body: Callable[[Any], None], count: int = 1) -> Iterator[list[tuple[Any, Any]]]:
    """Processes and the pipes to them, which are there as long as the context."""
    spawn = multiprocessing.get_context("spawn")
    made = []
    try:
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=body, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            made.append((process, ours))
        yield made
        for process, pipe in made:
            if process.is_alive():
                pipe.send("end")
            process.join(PATIENCE)
    finally:
        for process, _ in made:
            if process.is_alive():
                process.kill()


def check_pattern(data: int, counter: int) -> str:
    wrong = num_differences(data, counter)
    return f"{wrong} words differ" if wrong else "read"


def sharing() -> Iterator[Row]:
    """Who closes first, or dies."""
    counter = allocate(4096)
    # The last is forbidden, so it may do harm.
    for what in ("the importer closes first", "the exporter is killed", "the exporter frees first"):
        with started(exporter) as [(process, pipe)]:
            handle = receive(pipe)
            start = time.perf_counter()
            data = opened(handle)
            seconds = time.perf_counter() - start
            yield {"what": "open", "ranks": 2, "us": seconds * 1e6, "outcome": check_pattern(data, counter)}
            if what == "the exporter frees first":
                pipe.send("free")
                yield {"what": what, "ranks": 2, "us": None, "outcome": receive(pipe)}
            if what == "the exporter is killed":
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                read = outcome(lambda data=data: check_pattern(data, counter))
                yield {"what": what, "ranks": 2, "us": None, "outcome": read}
            closed = outcome(lambda data=data: probes.call("close", probes.address(data)) or "closed")
            yield {"what": f"close: {what}", "ranks": 2, "us": None, "outcome": closed}


def meet_in_processes(size: int) -> Iterator[Row]:
    with started(meeter, size) as ranks:
        handles = [receive(pipe) for _, pipe in ranks]
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((rank, handles))
        seconds, late = 0.0, 0
        for _ in range(2):  # the first one loads the kernel
            for _, pipe in ranks:
                assert receive(pipe) == "ready"
            for _, pipe in ranks:
                pipe.send("go")
            times = [receive(pipe) for _, pipe in ranks]
            seconds, late = max(time for time, _ in times), late | max(bits for _, bits in times)
        for _, pipe in ranks:
            assert receive(pipe) == "closed"
    met = "a rank did not come" if late else "met"
    yield {"what": "meeting, processes", "ranks": size, "us": seconds / PROCESS_ROUNDS * 1e6, "outcome": met}


def pulled_decodes() -> Iterator[Row]:
    import torch

    from zcomm import codec
    from zcomm_bench import gpu_clock

    values = torch.empty(DECODED, dtype=torch.bfloat16, device="cuda").normal_()
    job = [(values.data_ptr(), DECODED)]
    num_bytes = codec.wire_bytes("int8:256", "bfloat16", DECODED)
    wire = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    own = wire.data_ptr()
    probes.codec_pass(probes.ENCODE, job, "bfloat16", wires=[own], format="int8:256")()
    probes.call("synchronize")
    with started(exporter) as [(_, pipe)]:
        data = opened(receive(pipe))
        if num_bytes > SHARED:
            raise RuntimeError(f"a wire of {num_bytes} bytes does not fit")
        probes.call("copy", probes.address(data), probes.address(own), ctypes.c_size_t(num_bytes))
        decoded = [torch.zeros_like(values) for _ in range(2)]
        passes = [
            probes.codec_pass(
                *(probes.DECODE, [(one.data_ptr(), DECODED)], "bfloat16"), wires=[place], format="int8:256"
            )
            for place, one in zip((own, data), decoded, strict=True)
        ]
        times = gpu_clock.seconds_of(passes, stage.pick(25, 1))
        same = "the same values" if torch.equal(*decoded) and decoded[0].any() else "other values"
        for what, of_pass in zip(("decode, own memory", "decode, opened memory"), times, strict=True):
            yield {"what": what, "ranks": 2, "us": statistics.median(of_pass) * 1e6, "outcome": same}
        probes.call("close", probes.address(data))


def rows() -> Iterator[Row]:
    """One question that fails does not stop the others."""
    questions: list[tuple[str, Callable[[], Iterator[Row]]]] = [("decode, opened memory", pulled_decodes)]
    questions += [("meeting, streams", partial(meet_on_streams, size)) for size in RANKS]
    questions += [("meeting, processes", partial(meet_in_processes, size)) for size in PROCESSES]
    questions.append(("sharing", sharing))  # at the end: what follows an illegal access fails
    for what, question in questions:
        try:
            yield from question()
        except RuntimeError as error:
            yield {"what": what, "ranks": None, "us": None, "outcome": str(error)}


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "ipc", COLUMNS, rows())
