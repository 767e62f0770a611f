"""A small GPT of Megatron-core's, trained by its own data parallelism on CPU tensors: test_megatron.py launches it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support import cuda_is_cpu

cuda_is_cpu.enter()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

import zcomm  # noqa: E402

STEPS, VOCABULARY, LENGTH = 6, 512, 32
SETTINGS = {
    "weights": None, "overlap": False, "average": False, "reduce_in_float32": True, "distributed_optimizer": True,
    "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "instances": 1,
    "float32_accumulation": False, "bucket": 400_000, "save": "", "load": "",
}  # fmt: skip


def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
    """Megatron's own wrapper refuses sequence parallelism."""
    made = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return made


def make(given: dict[str, Any]) -> tuple[Any, Any]:
    is_parallel, is_sharded = given["tensor_parallel"] > 1, given["distributed_optimizer"]
    experts = 4 if given["expert_parallel"] > 1 else None
    WrappedTorchNorm.__new__ = norm
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16, tensor_model_parallel_size=given["tensor_parallel"],
        sequence_parallel=is_parallel, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
        pipeline_model_parallel_size=given["pipeline_parallel"], pipeline_dtype=torch.bfloat16,
        expert_model_parallel_size=given["expert_parallel"], num_moe_experts=experts,
        moe_token_dispatcher_type="alltoall", add_bias_linear=experts is None,
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(num_experts=experts)
    gpt = GPTModel(
        config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=given["reduce_in_float32"], overlap_grad_reduce=given["overlap"],
        overlap_param_gather=given["overlap"], use_distributed_optimizer=is_sharded, bucket_size=given["bucket"],
        check_for_nan_in_grad=False, average_in_collective=given["average"],
        reduce_scatter_with_fp32_accumulation=given["float32_accumulation"],
        num_distributed_optimizer_instances=given["instances"],
    )  # fmt: skip
    model = DistributedDataParallel(config, data_parallel, gpt.bfloat16())
    stepping = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, use_distributed_optimizer=is_sharded,
        overlap_param_gather=given["overlap"], params_dtype=torch.bfloat16,
    )  # fmt: skip
    return model, get_megatron_optimizer(stepping, [model])


def keep(model: Any, optimizer: Any, folder: str) -> None:
    """Write a checkpoint as Megatron's training does: by its distributed checkpointing."""
    dist_checkpointing.save(sharded(model, optimizer), folder)


def restore(model: Any, optimizer: Any, folder: str) -> None:
    loaded = dist_checkpointing.load(sharded(model, optimizer, is_loading=True), folder)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def sharded(model: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    state = {"model": model.module.sharded_state_dict()}
    how = {"distrib_optim_sharding_type": "dp_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=how)
    return state


def pretrain(given: dict[str, Any]) -> list[float]:
    """In the process group that is there; return the losses."""
    parallel_state.initialize_model_parallel(
        given["tensor_parallel"], given["pipeline_parallel"], expert_model_parallel_size=given["expert_parallel"],
        num_distributed_optimizer_instances=given["instances"],
    )  # fmt: skip
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = make(given)
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    data = torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0)).chunk(size)[rank]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    places = torch.arange(LENGTH).expand(len(data), -1)

    def forward(_: Any, part: Any) -> tuple[torch.Tensor, Any]:
        output = part(data[:, :-1], places, mask, labels=data[:, 1:])
        return output, lambda output: (output.float().mean(), {"loss": output.float().mean().item()})

    losses: list[float] = []
    for number in range(STEPS):
        if number == 1 and given["load"]:  # after a step: before it Megatron's optimizer has no state to load into
            restore(model, optimizer, given["load"])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        shown = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=None, model=[model], num_microbatches=1, seq_length=LENGTH,
            micro_batch_size=len(data), forward_only=False,
        )  # fmt: skip
        finalize_model_grads([model])
        optimizer.step()
        losses += [one["loss"] for one in shown]
    if given["save"]:
        keep(model, optimizer, given["save"])
    return losses


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    dist.init_process_group(given["backend"])
    if given["backend"] == "zcomm":
        zcomm.megatron.install(weights=given["weights"])
    losses = pretrain(given)
    if dist.get_rank() == dist.get_world_size() - 1:  # of the last stage
        groups = {
            "data": parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "experts": parallel_state.get_expert_model_parallel_group(),
            "experts' data": parallel_state.get_expert_data_parallel_group(),
        }
        if given["instances"] > 1:
            groups["instances"] = parallel_state.get_inter_distributed_optimizer_instance_group()
        is_ours = given["backend"] == "zcomm"
        counters = {name: asdict(zcomm.stats(group)) for name, group in groups.items()} if is_ours else {}
        Path(given["out"]).write_text(json.dumps({"losses": losses, "counters": counters}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # saving starts processes that import this file
    main(SETTINGS | json.loads(sys.argv[1]))
