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
        self.formats: _c10d.PolicyOverride | None = None  # of the state, read once
        self.plans: dict[int, _c10d.PlannedAllReduce] = {}  # of the last all-reduce of each bucket

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
        formats: intra-node, then inter-node, ``"int8:128/int4:128"``, or one format for both. The mean is gathered in
            the intra-node format.
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
    buckets, feedback = state._buckets, state.error_feedback
    if buckets.formats is None:
        buckets.formats = _c10d.PolicyOverride(all_reduce=state.formats)
    key = _residual_key(buckets, feedback, backend, bucket) if feedback is not None else None
    plan = backend.plan_all_reduce(
        gradients,
        dist.ReduceOp.AVG,
        formats=buckets.formats,
        feedback=feedback.block_format if feedback is not None and key is not None else None,
        kept=buckets.plans.get(bucket.index()),
    )
    if plan is None:
        with override(all_reduce="exact"):
            work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=state.process_group, async_op=True)
    else:
        buckets.plans[bucket.index()] = plan
        residual = None
        if feedback is not None and key is not None:
            data, empty = feedback.use(
                key,
                f"{gradients.dtype} {plan.format}",
                plan.residual_bytes,
                lambda size: torch.empty(size, dtype=torch.uint8, device=gradients.device),
            )
            residual = _c10d.Residual(data, decay=feedback.decay, empty=empty)
        work = plan.run(gradients, dist.ReduceOp.AVG, residual=residual, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return future


def _residual_key(
    buckets: _Buckets, feedback: ErrorFeedback, backend: _c10d.ProcessGroup, bucket: GradBucket
) -> str | None:
    """None the first time that this bucket is seen."""
    name = buckets.name_of(bucket)
    key = f"{feedback.claim(buckets, 'DDP')}: {name}/rank {backend.rank()}"
    return None if buckets.is_new(name) and not feedback.has(key) else key
