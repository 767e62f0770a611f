"""Weights of 8 and 4 bits as trainers gather them: codes and scales, in bytes.

A payload is what one parameter group of FSDP2 would send of a weight. It is a flat uint8 tensor: codes, then scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

MX_BLOCK, NV_BLOCK, TILE = 32, 16, 128
MX_BIAS = 127  # of exponents
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes by code


def float8(weight: torch.Tensor) -> torch.Tensor:
    """Cast to E4M3 with one scale per tensor, as torchao does. The payload does not contain the scale."""
    scale = LARGEST_E4M3 / weight.abs().amax().clamp(min=1e-12)
    return (weight * scale).to(torch.float8_e4m3fn).flatten().view(torch.uint8)


def mxfp8_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to E4M3 with a power of two per 32 values (OCP Microscaling Formats 1.0, scales rounded down). Return codes
    and biased exponents."""
    blocks = _blocks(weight, MX_BLOCK)
    exponents = torch.frexp(blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-118)).exponent - 9
    codes = torch.ldexp(blocks, -exponents).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return codes.flatten().view(torch.uint8), (exponents + MX_BIAS).to(torch.uint8).flatten()


def mxfp8(weight: torch.Tensor) -> torch.Tensor:
    """Cast as :func:`mxfp8_parts`."""
    return torch.cat(mxfp8_parts(weight))


def float8_in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Cast to E4M3 with a float32 scale per 128 x 128 values, here in a row, as in DeepSeek-V3 (arXiv 2412.19437)."""
    blocks = _blocks(weight, TILE * TILE)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST_E4M3
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return torch.cat([codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """Cast to E2M1, two codes to a byte, with an E4M3 scale per 16 values and one scale per tensor (NVIDIA's NVFP4)."""
    blocks = _blocks(weight, NV_BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    of_tensor = (largest.amax() / (LARGEST_E2M1 * LARGEST_E4M3)).clamp(min=1e-12)
    scales = (largest / LARGEST_E2M1 / of_tensor).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * of_tensor).clamp(min=1e-12)
    magnitudes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)
    codes = (magnitudes + 8 * (scaled < 0).to(torch.uint8)).flatten()
    return torch.cat([codes[0::2] + 16 * codes[1::2], scales.flatten().view(torch.uint8)])


#: Casts by name.
PAYLOADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float8": float8,
    "MXFP8": mxfp8,
    "float8 in tiles": float8_in_tiles,
    "NVFP4": nvfp4,
}


def _blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows of ``size`` float32 values, the last one filled up with zeros."""
    flat = weight.detach().float().flatten()
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)
