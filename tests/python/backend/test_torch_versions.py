"""Differences between the versions of torch: the binding that is loaded, names of calls, deprecations."""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import run
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm import _core
from zcomm.distributed import backend, binding, overrides

NUM = 32 * 1024  # elements of a shard: above min_bytes


def test_a_torch_without_a_binding_is_told_which_have_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_c10d_2_11", "_c10d_2_9", "_core"):
        (tmp_path / f"{name}.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(_core, "__file__", str(tmp_path / "_core.so"))
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    with pytest.raises(ImportError) as caught:
        binding._load()
    assert str(caught.value).startswith(
        "expected torch 2.9 or 2.11, for which this zcomm was built, got torch 2.99.1+cpu"
    )
    assert "'pip install --force-reinstall --no-deps .'" in str(caught.value)


def test_a_binding_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    (tmp_path / f"_c10d_{minor.replace('.', '_')}.so").write_text("not a library " * 100)
    monkeypatch.setattr(_core, "__file__", str(tmp_path / "_core.so"))
    with pytest.raises(ImportError, match=f"binding for torch {minor} does not load in torch .*invalid ELF header"):
        binding._load()


def gather_and_scatter(gather: Any, scatter: Any) -> tuple[int, int]:
    """Return the number of compressed calls of each kind."""
    whole = torch.randn(2 * NUM, generator=torch.Generator().manual_seed(1))
    with zcomm.override(forms="single,in_place"):
        gather(whole, whole[dist.get_rank() * NUM :][:NUM])
        scatter(torch.empty(NUM), whole)
    stats = zcomm.stats()
    return stats.all_gather.calls, stats.reduce_scatter.calls


def by_older_names() -> tuple[int, int]:
    warnings.simplefilter("ignore", FutureWarning)  # from torch 2.13
    return gather_and_scatter(dist.all_gather_into_tensor, dist.reduce_scatter_tensor)


def by_newer_names() -> tuple[int, int]:
    return gather_and_scatter(dist.all_gather_single, dist.reduce_scatter_single)


def test_both_names_of_a_call_are_compressed() -> None:
    assert run(by_older_names) == [(1, 1)] * 2
    assert run(by_newer_names) == [(1, 1)] * 2


def train_with_secondary_shards() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    secondary = zcomm.fsdp.compress(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.randn(4, 256)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.01)
    with zcomm.exact():
        model(torch.randn(4, 256))
    secondary.invalidate()
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


def test_zcomm_calls_nothing_that_torch_deprecates() -> None:
    with warnings.catch_warnings():  # ranks are forked, with these filters
        warnings.filterwarnings("error", message="(?i).*deprecat")
        run(train_with_secondary_shards, nodes=[0, 1])


def test_what_is_in_force_is_referenced_until_it_ends() -> None:
    """torch 2.11 stashes an object without a reference to it."""
    active = overrides._Active({}, None)
    before = sys.getrefcount(active)
    overrides._activate(active)
    assert sys.getrefcount(active) == before + 1
    overrides._activate(None)
    assert sys.getrefcount(active) == before


@pytest.mark.skipif(
    binding.TORCH < (2, 15) or not dist.is_nccl_available() or torch.cuda.is_available(),
    reason="needs torch 2.15 or later with NCCL, and no GPU",
)
def test_the_inner_group_of_cuda_tensors_is_what_torch_calls_nccl() -> None:
    options = zcomm.Options()
    options._timeout, options.group_name, options.global_ranks_in_group = datetime.timedelta(seconds=9), "group", [0]
    with pytest.raises(RuntimeError, match="nccl2 requires at least one CUDA device"):  # said by that engine alone
        backend._make_nccl(dist.HashStore(), 0, 1, options)
