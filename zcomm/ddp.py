"""Compressed gradients for DistributedDataParallel.

    model = DistributedDataParallel(model)
    model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)

Buckets of other models, and every other all-reduce of the group, stay as the group's options have them.
"""

from dataclasses import dataclass  # without postponed annotations: DDP looks at the hook's own
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from zcomm.backend import backend_of
from zcomm.feedback import ErrorFeedback
from zcomm.policy import override


@dataclass(frozen=True)
class CompressState:
    """What :func:`compress_hook` is registered with.

    Args:
        formats: ``"INSIDE/BETWEEN"`` nodes, or one format for both. The mean is gathered in the INSIDE format.
        process_group: that of the model; default: the world. It must have been made with the backend "zcomm".
        error_feedback: what a bucket's reduction drops is added to its next one. DDP makes other buckets after the
            first backward pass: residuals of the first ones stay, unused, until ``reset()``.
    """

    formats: str = "int8:128/int4:128"
    process_group: dist.ProcessGroup | None = None
    error_feedback: ErrorFeedback | None = None


def compress_hook(state: CompressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: the mean of each bucket by a compressed all-reduce.

    Several buckets are under way at once. Buckets below the group's ``min_bytes`` stay exact, as do those of other
    dtypes than float32, bfloat16 and float16, and all inside ``zcomm.exact()``. Raises ValueError if the group is not
    zcomm's or a format is wrong.
    """
    backend = backend_of(state.process_group)
    gradients = bucket.buffer()
    formats = backend.all_reduce_format(gradients, dist.ReduceOp.AVG, state.formats)
    if formats != "exact" and state.error_feedback is not None:
        work = _with_feedback(state.error_feedback, backend, bucket, formats)
    else:
        with override(all_reduce=formats):
            work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=state.process_group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return future


def _with_feedback(feedback: ErrorFeedback, backend: Any, bucket: GradBucket, formats: str) -> Any:
    gradients = bucket.buffer()
    num_bytes = backend.all_reduce_feedback_bytes(gradients, formats, feedback.format)
    residual, empty = feedback.use(
        f"bucket {bucket.index()} of {gradients.numel()}/rank {backend.rank()}",
        f"{gradients.dtype} {formats}",
        num_bytes,
        lambda size: torch.empty(size, dtype=torch.uint8, device=gradients.device),
    )
    terms = (residual, feedback.format, feedback.decay, empty)
    return backend.all_reduce_feedback(gradients, dist.ReduceOp.AVG, formats, terms, True)
