"""Ways to write to the weights of a model under FSDP2, by name: what PyTorch counts, and what it does not."""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.training import make_batch

Change = Callable[[nn.Module, Path], Any]
WAYS: dict[str, Change] = {}


def way(change: Change) -> Change:
    WAYS[change.__name__] = change
    return change


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards, as PyTorch hands them out: detached."""
    return [parameter.detach().to_local() for parameter in model.parameters()]


def step(optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()


# --- What PyTorch counts


@way
def in_place_operations(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


@way
def assignment_to_a_slice(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter[:] = parameter * 1.5


@way
def copy_into_the_local_tensor(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.to_local().copy_(parameter.to_local() * 1.5)


@way
def foreach_copy_into_local_tensors(model: nn.Module, _: Path) -> None:
    shards = [parameter.to_local() for parameter in model.parameters()]
    torch._foreach_copy_(shards, [shard * 1.5 for shard in shards])


@way
def an_optimizer_of_torch(model: nn.Module, _: Path) -> None:
    step(torch.optim.AdamW(model.parameters(), fused=True), model.parameters())


@way
def load_state_dict(model: nn.Module, _: Path) -> None:
    model.load_state_dict({name: value.detach() * 2 for name, value in model.state_dict().items()})


@way
def load_state_dict_that_assigns(model: nn.Module, _: Path) -> None:
    model.load_state_dict({name: value.detach() * 3 for name, value in model.state_dict().items()}, assign=True)


@way
def set_model_state_dict_of_whole_weights(model: nn.Module, _: Path) -> None:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = {name: value * 1.5 for name, value in whole.items()}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


@way
def dcp_load_of_the_model(model: nn.Module, folder: Path) -> None:
    dcp.save({"model": model}, checkpoint_id=folder / "model")
    in_place_operations(model, folder)
    model(make_batch(0)[0])
    dcp.load({"model": model}, checkpoint_id=folder / "model")


# --- What it does not count


def load_after(change: Change, model: nn.Module, folder: Path) -> None:
    """Take a change back by a checkpoint, as the tutorial of torch.distributed.checkpoint does."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "state")
    change(model, folder)
    model(make_batch(0)[0])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "state")


@way
def dcp_load_into_a_state_dict(model: nn.Module, folder: Path) -> None:
    load_after(in_place_operations, model, folder)


@way
def data_copy(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


@way
def data_assigned(model: nn.Module, _: Path) -> None:
    """Weights that were rounded to four bits and back."""
    for parameter in model.parameters():
        scale = parameter.to_local().abs().max().clamp(min=1e-6) / 7
        parameter.data.to_local().copy_((parameter.to_local() / scale).round() * scale)


@way
def foreach_lerp(model: nn.Module, _: Path) -> None:
    torch._foreach_lerp_(list(model.parameters()), [p.detach() * 2 for p in model.parameters()], 0.5)


@way
def foreach_mul_of_data(model: nn.Module, _: Path) -> None:
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 1.5)


@way
def foreach_add_of_detached_shards(model: nn.Module, _: Path) -> None:
    torch._foreach_add_(locals_of(model), 0.125)


@way
def broadcast(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        values = shard.new_full((max(int(dist_max(shard.numel())), 1),), 0.25)
        shard.flatten().copy_(values[: shard.numel()])
        if shard.numel() == dist_max(shard.numel()):
            shard.mul_(2)


@way
def all_reduce(model: nn.Module, _: Path) -> None:
    """All-reduce parts that all ranks have."""
    for shard in locals_of(model):
        common = -int(dist_max(-shard.numel()))
        dist.all_reduce(shard.flatten()[:common])


@way
def adamw_of_detached_shards(model: nn.Module, _: Path) -> None:
    shards = locals_of(model)
    step(torch.optim.AdamW(shards, lr=1e-2), shards)


@way
def foreach_sgd_of_detached_shards(model: nn.Module, _: Path) -> None:
    shards = locals_of(model)
    step(torch.optim.SGD(shards, lr=1e-2, foreach=True), shards)


@way
def fused_adamw_of_detached_shards(model: nn.Module, _: Path) -> None:
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    step(torch.optim.AdamW(shards, lr=1e-2, fused=True), shards)


@way
def shards_of_a_state_dict(model: nn.Module, _: Path) -> None:
    for value in model.state_dict().values():
        value.to_local().mul_(1.5)


@way
def shards_of_get_model_state_dict(model: nn.Module, _: Path) -> None:
    for value in get_model_state_dict(model).values():
        value.to_local().mul_(1.5)


@way
def set_to_its_own_storage(model: nn.Module, _: Path) -> None:
    """Write as ``swap_tensors`` and quantizers do inside of a parameter."""
    for shard in locals_of(model):
        other = shard * 1.5
        shard.data.set_(shard.data.untyped_storage(), shard.storage_offset(), shard.shape, shard.stride())
        shard.data.copy_(other)


@way
def a_vector_of_all_parameters(model: nn.Module, _: Path) -> None:
    shards = locals_of(model)
    vector = parameters_to_vector(shards) * 1.5
    copies = [shard.clone() for shard in shards]
    vector_to_parameters(vector, copies)
    for shard, copy in zip(shards, copies, strict=True):
        shard.copy_(copy)


@way
def numpy_view(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        shard.numpy()[...] *= 1.5


@way
def dlpack_view(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        torch.from_dlpack(shard).mul_(1.5)


@way
def a_kernel_that_has_addresses(model: nn.Module, _: Path) -> None:
    """Write as fused optimizers of Apex and DeepSpeed do."""
    for shard in locals_of(model):
        values = (shard * 1.5).contiguous()
        ctypes.memmove(shard.data_ptr(), values.data_ptr(), values.nbytes)


@way
def a_flat_buffer_that_is_copied_back(model: nn.Module, _: Path) -> None:
    """Write as DeepSpeed's and Megatron's optimizers do."""
    shards = locals_of(model)
    flat = torch.cat([shard.flatten() for shard in shards]) * 1.5
    for shard, part in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
        shard.data.copy_(part.view_as(shard))


@way
def storage_copy(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        storage = shard.untyped_storage()
        storage.copy_(torch.full((storage.nbytes() // 4,), 0.25).untyped_storage())


@way
def average_of_swa_utils(model: nn.Module, _: Path) -> None:
    average = AveragedModel(nn.ParameterList([shard.clone() for shard in locals_of(model)]),
                            multi_avg_fn=get_ema_multi_avg_fn(0.5))  # fmt: skip
    average.update_parameters(nn.ParameterList([shard * 2 for shard in locals_of(model)]))
    average.update_parameters(nn.ParameterList([shard * 2 for shard in locals_of(model)]))
    for parameter, mean in zip(model.parameters(), average.module, strict=True):
        parameter.data.to_local().copy_(mean)


@way
def averaged_weights_that_are_swapped_in_and_out(model: nn.Module, _: Path) -> None:
    """Swap as torch_ema and diffusers do for an evaluation."""
    backup = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)
    model(make_batch(0)[0])
    for parameter, values in zip(model.parameters(), backup, strict=True):
        parameter.data.copy_(values * 1.25)


@way
def lora_that_is_merged(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.data += 0.01 * parameter.data.sign()


@way
def lora_that_is_unmerged(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        shard -= 0.01 * shard.sign()


@way
def target_network(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.data.lerp_(torch.ones_like(parameter.data), 0.005)


@way
def nn_init(model: nn.Module, _: Path) -> None:
    for shard in locals_of(model):
        nn.init.normal_(shard, std=0.02)


@way
def inference_mode(model: nn.Module, _: Path) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.data.mul_(1.5)


@way
def another_thread(model: nn.Module, _: Path) -> None:
    def write() -> None:
        with torch.no_grad():
            torch._foreach_mul_([parameter.data for parameter in model.parameters()], 1.5)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@way
def an_optimizer_whose_step_was_replaced(model: nn.Module, _: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.step = types.MethodType(lambda self: data_copy(model, Path()), optimizer)  # type: ignore[method-assign]
    optimizer.step()


@way
def an_optimizer_with_masters_of_its_own(model: nn.Module, _: Path) -> None:
    class Masters(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for parameter, master in zip(model.parameters(), self.param_groups[0]["params"], strict=True):
                parameter.data.copy_(master.add_(0.01))

    Masters([parameter.detach().clone() for parameter in model.parameters()], {}).step()


def dist_max(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
