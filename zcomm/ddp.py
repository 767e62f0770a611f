"""Compressed gradients for DistributedDataParallel.

    model = DistributedDataParallel(model)
    model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)

Buckets of other models, and every other all-reduce of the group, stay as the group's options have them.
"""

from dataclasses import dataclass  # without postponed annotations: DDP looks at the hook's own

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from zcomm.backend import backend_of
from zcomm.policy import override


@dataclass(frozen=True)
class CompressState:
    """What :func:`compress_hook` is registered with.

    Args:
        formats: ``"INSIDE/BETWEEN"`` nodes, or one format for both. The mean is gathered in the INSIDE format.
        process_group: that of the model; default: the world. It must have been made with the backend "zcomm".
    """

    formats: str = "int8:128/int4:128"
    process_group: dist.ProcessGroup | None = None


def compress_hook(state: CompressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: the mean of each bucket by a compressed all-reduce.

    Several buckets are under way at once. Buckets below the group's ``min_bytes`` stay exact, as do those of other
    dtypes than float32, bfloat16 and float16. Raises ValueError if the group is not zcomm's or a format is wrong.
    """
    backend_of(state.process_group)
    gradients = bucket.buffer()
    with override(all_reduce=state.formats):
        work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=state.process_group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return future
