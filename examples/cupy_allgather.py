"""Compressed all-gathers of CuPy arrays between all GPUs of this machine, without torch.

    python examples/cupy_allgather.py [--ranks N] [--elements N] [--formats exact,bf16,int8:256,int4:128]

Needs CuPy for the CUDA toolkit of the driver (``pip install cupy-cuda13x``), NCCL (``pip install nvidia-nccl-cu13``)
and a zcomm that was built where nvcc is. Each rank is a process with one GPU; pipes carry the group's id.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from multiprocessing.connection import Connection

import zcomm

REPEATS = 20


def rank_main(rank: int, size: int, elements: int, formats: list[str], pipe: Connection) -> None:
    """Run one rank, which sends lines of the table to its parent."""
    import cupy

    cupy.cuda.Device(rank).use()

    def shard_of(owner: int) -> cupy.ndarray:
        return cupy.random.default_rng(owner).standard_normal(elements, dtype=cupy.float32)

    shard, out = shard_of(rank), cupy.empty(size * elements, cupy.float32)
    with zcomm.Communicator(rank, size, pipe.recv(), device=rank, timeout=60) as comm:
        for format in formats:
            comm.all_gather(shard, out, format=format)  # the first call allocates
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(REPEATS):
                stats = comm.all_gather(shard, out, format=format)
            end.record()
            end.synchronize()
            seconds = cupy.cuda.get_elapsed_time(begin, end) / 1e3 / REPEATS
            slots = out.reshape(size, elements)
            error = max(float(cupy.abs(slots[owner] - shard_of(owner)).max()) for owner in range(size))
            pipe.send((format, stats.wire_bytes / 1e6, seconds * 1e3, out.nbytes / 1e9 / seconds, error))
    pipe.send(None)


def visible_gpus() -> int:
    """Return the number of GPUs; exit with the reason if there is none."""
    try:
        import cupy
    except ImportError:
        sys.exit("this example needs CuPy, and there is none: pip install cupy-cuda13x (or cupy-cuda12x)")
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"this example needs a GPU, and CUDA finds none: {error}")
    if not count:
        sys.exit("this example needs a GPU, and CUDA finds none")
    return count


def main() -> None:
    """Start the ranks and print their measurements."""
    parser = argparse.ArgumentParser(description="Compressed all-gathers of CuPy arrays.")
    parser.add_argument("--ranks", type=int, help="processes; by default one per GPU")
    parser.add_argument("--elements", type=int, default=16 * 2**20, help="float32 values of a shard")
    parser.add_argument("--formats", default="exact,bf16,int8:256,int4:128")
    given = parser.parse_args()
    gpus = visible_gpus()
    size = given.ranks or gpus
    if not 1 <= size <= gpus:
        sys.exit(f"--ranks: expected 1 to {gpus}, got {size}: each rank has a GPU of its own")
    try:
        unique_id = zcomm.Communicator.unique_id()
    except RuntimeError as error:
        sys.exit(str(error))

    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        pipe, other = context.Pipe()
        arguments = (rank, size, given.elements, given.formats.split(","), other)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        other.close()
        pipe.send(unique_id)
        pipes.append(pipe)
    print(f"{size} ranks gather {size * given.elements * 4 / 1e6:.0f} MB of float32")
    print(f"{'format':>10} {'MB sent':>10} {'ms':>10} {'GB/s':>10} {'max error':>10}")
    try:
        while (line := pipes[0].recv()) is not None:
            print("{:>10} {:>10.1f} {:>10.3f} {:>10.1f} {:>10.5f}".format(*line), flush=True)
    except EOFError:
        pass  # its traceback tells
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
