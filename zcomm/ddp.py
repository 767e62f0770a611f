"""Compressed gradients for DistributedDataParallel.

    model = DistributedDataParallel(model)
    model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)

The group's options still apply to buckets of other models and to all other all-reduces of the group.
"""

import array
import itertools
import weakref
import zlib
from dataclasses import dataclass, field  # no postponed annotations here: DDP inspects those of the hook

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from zcomm._checks import check_types
from zcomm.distributed import _ddp
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of, living_backends
from zcomm.distributed.overrides import forced_exact
from zcomm.distributed.residuals import residual_of
from zcomm.feedback import ErrorFeedback


class _Buckets:
    """Buckets seen so far, identified by their parameters in order. Parameters are numbered when they are first seen,
    which gives the same numbers in every run of a program."""

    def __init__(self, formats: _c10d.PolicyOverride) -> None:
        self.formats = formats
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = itertools.count()
        self.seen: set[str] = set()  # names
        self.rank: int | None = None  # that the residuals are of
        # Of the last all-reduce of each bucket, by its index and its first parameter.
        self.plans: dict[tuple[int, int], _c10d.Operation] = {}

    def name_of(self, bucket: GradBucket) -> str:
        numbers = array.array("Q")
        for parameter in bucket.parameters():
            known = self._numbers.get(id(parameter))
            if known is None or known[0]() is not parameter:
                known = self._numbers[id(parameter)] = (weakref.ref(parameter), next(self._next))
            numbers.append(known[1])
        return f"bucket {bucket.index()} of {bucket.buffer().numel()}, order {zlib.crc32(numbers.tobytes()):08x}"


@dataclass(frozen=True)
class CompressState:
    """State to register with :func:`compress_hook`.

    Args:
        formats: intra-node and inter-node format, ``"int8:128/int4:128"``, or one format for both. The mean is gathered
            in the intra-node format.
        process_group: a group with the backend "zcomm" to reduce in; by default the model's.
        error_feedback: adds the error of a bucket's reduction to the bucket's next reduction. DDP rebuilds its buckets
            after the first backward pass, so feedback starts the second time a bucket is seen with the same parameters
            in the same order, also after a resume.

    Raises ValueError or TypeError if ``formats`` cannot be parsed.

    Example::

        model.register_comm_hook(CompressState("int8:128/int4:128"), compress_hook)
    """

    formats: str = "int8:128/int4:128"
    process_group: dist.ProcessGroup | None = None
    error_feedback: ErrorFeedback | None = None
    _buckets: _Buckets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types(vars(self), process_group=dist.ProcessGroup | None, error_feedback=ErrorFeedback | None)
        try:
            formats = _c10d.PolicyOverride(all_reduce=self.formats)
        except (TypeError, ValueError) as error:
            raise type(error)(f"formats: {str(error).removeprefix('all_reduce: ')}") from None
        object.__setattr__(self, "_buckets", _Buckets(formats))  # the class is frozen


def compress_hook(state: CompressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DistributedDataParallel: computes each bucket's mean by a compressed all-reduce.

    Several buckets are reduced at the same time. Buckets below the group's ``min_bytes`` stay exact, as do buckets of
    dtypes other than float32, bfloat16 and float16, and all buckets inside ``zcomm.exact()``. They have the
    bits of torch's ``allreduce_hook``. Raises ValueError if the group is not zcomm's, or not known among several as
    ``register_comm_hook`` was bypassed; and TypeError if the hook was registered with another state.
    """
    if not isinstance(state, CompressState):
        raise TypeError(f"state: expected a zcomm.ddp.CompressState, got {state!r}")
    buckets, feedback = state._buckets, state.error_feedback
    group = state.process_group if state.process_group is not None else _group_of(bucket)
    backend = backend_of(group)
    gradients = bucket.buffer()
    place = bucket.index(), id(bucket.parameters()[0])
    key = _residual_key(buckets, feedback, backend, bucket) if feedback is not None else None
    plan = backend.plan(
        gradients,
        op=dist.ReduceOp.AVG,
        formats=buckets.formats,
        feedback=feedback.block_format if feedback is not None and key is not None else None,
        like=buckets.plans.get(place),
    )
    if isinstance(plan, _c10d.Verdict):
        gradients.div_(backend.size())  # before the sum, which may be beyond float16
        with forced_exact(plan):
            work = dist.all_reduce(gradients, group=group, async_op=True)
    else:
        buckets.plans[place] = plan
        residual = None
        if feedback is not None and key is not None:
            layout = f"{gradients.numel()} {gradients.dtype} in {plan.format} of {plan.ranks}"
            residual = residual_of(feedback, key, layout, plan.residual_bytes, gradients.device)
        work = plan.run(gradients, op=dist.ReduceOp.AVG, residual=residual, async_op=True)

    def reduced(done: torch.futures.Future[object]) -> torch.Tensor:
        done.value()  # raises if the reduction failed: torch calls this function then, too
        return gradients

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
    return future


def _group_of(bucket: GradBucket) -> dist.ProcessGroup | None:
    """Return the group of the bucket's model; None, the world, if the model is unknown and there is no other group."""
    model = _ddp.model_of(bucket.parameters()[0])
    if model is not None:
        return model.process_group
    backend_of()  # raises if the world has another backend
    if len(living_backends()) > 1:
        raise ValueError("process_group: expected the model's, as no model has registered a hook for these gradients")
    return None


def _residual_key(
    buckets: _Buckets, feedback: ErrorFeedback, backend: _c10d.ProcessGroup, bucket: GradBucket
) -> str | None:
    """Return the bucket's key, or None the first time that the bucket is seen."""
    name = buckets.name_of(bucket)
    owner, rank = feedback.claim(buckets, "DDP"), dist.get_rank()
    if buckets.rank not in (None, rank):  # a residual leaves out what its rank keeps
        feedback.forget(owner)
    buckets.rank = rank
    key = f"{owner}: {name}/rank {rank}"
    is_new = name not in buckets.seen
    buckets.seen.add(name)
    return None if is_new and not feedback.has(key) else key
