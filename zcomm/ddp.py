"""Compressed gradients for DistributedDataParallel.

    model = DistributedDataParallel(model)
    model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)

Buckets of other models, and every other all-reduce of the group, stay as the group's options have them.
"""

import array
import itertools
import weakref
import zlib
from dataclasses import dataclass, field  # without postponed annotations: DDP looks at the hook's own

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import override
from zcomm.feedback import ErrorFeedback


class _Buckets:
    """Those that were seen, each by its parameters in their order. Parameters are numbered as they are first seen,
    which is the same in every run of a program."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = itertools.count()
        self._seen: set[str] = set()

    def name_of(self, bucket: GradBucket) -> str:
        numbers = array.array("Q")
        for parameter in bucket.parameters():
            known = self._numbers.get(id(parameter))
            if known is None or known[0]() is not parameter:
                known = self._numbers[id(parameter)] = (weakref.ref(parameter), next(self._next))
            numbers.append(known[1])
        return f"bucket {bucket.index()} of {bucket.buffer().numel()}, order {zlib.crc32(numbers.tobytes()):08x}"

    def is_new(self, name: str) -> bool:
        if name in self._seen:
            return False
        self._seen.add(name)
        return True


@dataclass(frozen=True)
class CompressState:
    """What :func:`compress_hook` is registered with.

    Args:
        formats: ``"INSIDE/BETWEEN"`` nodes, or one format for both. The mean is gathered in the INSIDE format.
        process_group: that of the model; default: the world. It must have been made with the backend "zcomm".
        error_feedback: what a bucket's reduction drops is added to its next one, from the second time on that a bucket
            has the same parameters in the same order: DDP makes other buckets after the first backward pass. So a run
            that is resumed goes on with its residuals from its second step on.
    """

    formats: str = "int8:128/int4:128"
    process_group: dist.ProcessGroup | None = None
    error_feedback: ErrorFeedback | None = None
    _buckets: _Buckets = field(init=False, repr=False, compare=False, default_factory=_Buckets)


def compress_hook(state: CompressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: the mean of each bucket by a compressed all-reduce.

    Several buckets are under way at once. Buckets below the group's ``min_bytes`` stay exact, as do those of other
    dtypes than float32, bfloat16 and float16, and all inside ``zcomm.exact()``. Raises ValueError if the group is not
    zcomm's or a format is wrong.
    """
    backend = backend_of(state.process_group)
    gradients = bucket.buffer()
    formats = backend.all_reduce_format(gradients, dist.ReduceOp.AVG, state.formats)
    feedback = None
    if formats != "exact" and state.error_feedback is not None:
        feedback = _feedback_of(state, state.error_feedback, backend, bucket, formats)
    if feedback is not None:
        work = backend.all_reduce_feedback(gradients, dist.ReduceOp.AVG, formats, feedback, True)
    else:
        with override(all_reduce=formats):
            work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=state.process_group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return future


def _feedback_of(
    state: CompressState, feedback: ErrorFeedback, backend: _c10d.ProcessGroup, bucket: GradBucket, formats: str
) -> tuple[torch.Tensor, str, float, bool] | None:
    """None the first time that this bucket is seen."""
    name = state._buckets.name_of(bucket)
    key = f"{feedback.claim(state._buckets, 'DDP')}: {name}/rank {backend.rank()}"
    if state._buckets.is_new(name) and not feedback.has(key):
        return None
    gradients = bucket.buffer()
    residual, empty = feedback.use(
        key,
        f"{gradients.dtype} {formats}",
        backend.all_reduce_feedback_bytes(gradients, formats, feedback.format),
        lambda size: torch.empty(size, dtype=torch.uint8, device=gradients.device),
    )
    return residual, feedback.format, feedback.decay, empty
