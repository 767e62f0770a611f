"""Parameters that FSDP2 gathers as codes of 8 bits and scales, through its extensions of tensor subclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bench.narrow_weights import MX_BIAS, MX_BLOCK, mxfp8_parts

KEEP = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class MxWeight(torch.Tensor):
    """A weight in float32 whose shards travel as MXFP8: E4M3 codes, and a byte with a power of two per 32 of them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> MxWeight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return,unused-ignore]
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            layout=data.layout, device=data.device, requires_grad=data.requires_grad,
        )  # fmt: skip

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(MxWeight, lambda weight: weight.data_, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, MxWeight, result) if func in KEEP else result

    def __repr__(self, **_: Any) -> str:
        return f"MxWeight({self.data_})"

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return mxfp8_parts(self.data_), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        codes, exponents = all_gather_outputs
        scales = torch.exp2(exponents.float() - MX_BIAS)
        values = (codes.view(torch.float8_e4m3fn).float().view(-1, MX_BLOCK) * scales[:, None]).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values.view_as(out))
            return None
        return values.view(-1, self.shape[-1]), (codes, exponents)


def narrow(model: nn.Module) -> None:
    """Make the weights of all linear layers of whole blocks travel as MXFP8."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features % MX_BLOCK == module.out_features % MX_BLOCK == 0:
            module.weight = nn.Parameter(MxWeight(module.weight.detach()))
