"""The signal-to-noise ratios in docs/numerics.md are those of the codec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zcomm import codec

PAGE = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "eden4", "eden3", "eden2"])
def test_a_row_of_the_table(kind: str) -> None:
    torch.manual_seed(0)
    normal = torch.randn(1 << 20)
    format, ratios = f"{kind}:128", []
    for values in (normal, normal * (1 + 19 * (torch.arange(1 << 20) % 64 == 0))):
        received = codec.decode(codec.encode(values, format), format, torch.empty_like(values))
        ratios.append(f"{10 * torch.log10(values.square().sum() / (values - received).square().sum()):.0f}")
    (row,) = (line.split(" | ") for line in PAGE.splitlines() if line.startswith(f"| `{kind}` | "))
    assert row[2:4] == ratios
