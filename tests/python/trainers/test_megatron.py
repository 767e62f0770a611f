"""zcomm.megatron: on stand-ins that call what Megatron's modules call, and slowly on Megatron's own modules."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.expected import assert_same_bits
from support.worlds import run
from torch.distributed.distributed_c10d import _coalescing_manager

import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single

TWO_NODES = [0, 0, 1, 1]
NUM = 1 << 16
ROOT = Path(__file__).parents[3]


class Bucket:
    def __init__(self, dtype: torch.dtype) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        self.param_data = torch.zeros(size * NUM).to(dtype)
        self.grad_data = torch.randn(size * NUM, generator=generator)
        self.own = self.param_data[rank * NUM :][:NUM]

    def step(self, number: int) -> None:
        values = torch.randn(NUM, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        self.own.copy_((0.02 * values).to(self.own.dtype) if self.own.is_floating_point() else (40 * values).byte())


class BucketGroup:
    """As Megatron-core's _ParamAndGradBucketGroup."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self.buckets = [Bucket(dtype) for dtype in dtypes]
        self.handle: Any = None

    def start_param_sync(self, async_op: bool = False) -> None:
        with megatron()._coalescing_manager(dist.group.WORLD, async_ops=async_op) as self.handle:
            for bucket in self.buckets:
                all_gather_single(bucket.param_data, bucket.own, async_op=async_op)

    def start_grad_sync(self, all_reduce: bool = False) -> None:
        with megatron()._coalescing_manager(dist.group.WORLD):
            for bucket in self.buckets:
                if all_reduce:
                    dist.all_reduce(bucket.grad_data)
                else:
                    own = bucket.grad_data[dist.get_rank() * NUM :][:NUM]
                    reduce_scatter_single(own, bucket.grad_data)


class DistributedOptimizer:
    def __init__(self, buckets: list[Bucket], **config: Any) -> None:
        self.config, self.buffers = SimpleNamespace(**config), [SimpleNamespace(buckets=buckets)]


def megatron() -> Any:
    return sys.modules["megatron.core.distributed.param_and_grad_buffer"]


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow"):
        return
    for name, content in {
        "megatron.core.distributed.param_and_grad_buffer": {"_ParamAndGradBucketGroup": BucketGroup},
        "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer": DistributedOptimizer},
    }.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        module = ModuleType(name)
        vars(module).update(content, _coalescing_manager=_coalescing_manager)
        monkeypatch.setitem(sys.modules, name, module)


def counted(name: str) -> tuple[int, dict[str, int]]:
    one = getattr(zcomm.stats(), name)
    return one.calls, {reason: calls.calls for reason, calls in one.exact.items()}


@pytest.mark.parametrize("async_op", [False, True])
def test_weights_and_gradients_are_compressed_with_one_line(async_op: bool) -> None:
    """Gathers of 16-bit copies in place, reductions and all-reduces of gradients. Nothing outside of Megatron's
    modules, and no parameters of float32, which the optimizer steps."""

    def body() -> None:
        zcomm.megatron.install()
        zcomm.megatron.install()  # as often as one likes
        group, stepped = BucketGroup(torch.bfloat16, torch.bfloat16), BucketGroup(torch.float32)
        for one in (group, stepped):
            for bucket in one.buckets:
                bucket.step(1)
            one.start_param_sync(async_op)
            if async_op:
                one.handle.wait()
            one.start_grad_sync()
            one.start_grad_sync(all_reduce=True)
        assert counted("all_gather") == (2, {"in_place": 1})
        assert counted("reduce_scatter") == (3, {})
        assert counted("all_reduce") == (3, {})
        activations = torch.randn(4 * NUM)
        reduce_scatter_single(torch.empty(NUM), activations)
        dist.all_reduce(activations)
        assert counted("reduce_scatter") == (3, {"unmarked": 1})
        assert counted("all_reduce") == (3, {"format_exact": 1})
        with zcomm.override(reduce_scatter="exact"):
            group.start_grad_sync(all_reduce=True)
        assert counted("all_reduce") == (3, {"format_exact": 3})
        with zcomm.exact():
            group.start_param_sync()
            group.start_grad_sync()
        assert counted("all_gather") == (2, {"in_place": 1, "format_exact": 2})
        assert counted("reduce_scatter") == (3, {"unmarked": 1, "format_exact": 2})

    run(body, 4, nodes=TWO_NODES)


def test_masters_whose_upper_half_is_the_weight_stay_exact() -> None:
    """The precision-aware optimizer stores only the remainders of bfloat16 parameters."""

    def body() -> None:
        zcomm.megatron.install()
        group = BucketGroup(torch.bfloat16)
        optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
        optimizer(group.buckets, use_precision_aware_optimizer=True, store_param_remainders=True)
        group.buckets[0].step(1)
        own = group.buckets[0].own.clone()
        group.start_param_sync()
        assert counted("all_gather") == (0, {"in_place": 1})
        assert_same_bits(group.buckets[0].own, own)

    run(body, 4, nodes=TWO_NODES)


@pytest.mark.parametrize("async_op", [False, True])
def test_lossless_weights_are_those_of_gloo(async_op: bool) -> None:
    """bfloat16 and bytes, over several steps: bit for bit, as differences to what the nodes keep."""

    def body() -> None:
        dtypes = (torch.bfloat16, torch.uint8, torch.float16)
        zcomm.megatron.install(weights="lossless")
        plain, groups = BucketGroup(*dtypes), [BucketGroup(dtype, dtype) for dtype in dtypes]
        ours = [bucket for group in groups for bucket in group.buckets]
        plain.buckets = [bucket for bucket in plain.buckets for _ in range(2)]
        for number in range(4):
            for bucket in (*plain.buckets, *ours):
                bucket.step(min(number, 2))
            for bucket in plain.buckets:
                all_gather_single(bucket.param_data, bucket.own.clone())
            before = zcomm.stats().all_gather.inter_node_bytes
            for group in groups:
                group.start_param_sync(async_op)
            for group in groups if async_op else []:
                group.handle.wait()
            for one, theirs in zip(ours, plain.buckets, strict=True):
                assert_same_bits(one.param_data, theirs.param_data, f"step {number}")
            moved = zcomm.stats().all_gather.inter_node_bytes - before
            assert moved > 0
            if number == 3:  # nothing has changed
                assert moved < 0.01 * sum(bucket.param_data.nbytes for bucket in ours)
        assert counted("all_gather")[0] == 24

    run(body, 4, nodes=TWO_NODES)


def test_lossless_weights_of_a_new_model_are_sent_whole() -> None:
    """Memory that is freed and used again has other weights."""

    def body() -> None:
        zcomm.megatron.install(weights="lossless")
        for number in range(3):
            group = BucketGroup(torch.bfloat16)
            group.buckets[0].step(number + dist.get_rank())
            group.start_param_sync()
            want = torch.empty_like(group.buckets[0].param_data)
            all_gather_single(want, group.buckets[0].own.clone())
            assert_same_bits(group.buckets[0].param_data, want, f"model {number}")

    run(body, 4, nodes=TWO_NODES)


def test_padding_of_megatron_fsdp_is_zero() -> None:
    """Before values come, and in each bucket that is fetched. Values stay."""

    class DataParallelBuffer:
        item_index_map: ClassVar = {n: SimpleNamespace(global_data_index=at, size=2) for n, at in enumerate((6, 0, 2))}
        bucket_index = SimpleNamespace(global_data_index=0, size=10)

        def init_data(self, data: torch.Tensor) -> None:
            self.data = data

        def fetch_bucket(self) -> SimpleNamespace:
            return SimpleNamespace(data=torch.full((10,), float("nan")).index_fill_(0, torch.tensor([1, 7]), 5.0))

    zcomm.megatron._keep_padding_zero(DataParallelBuffer)
    buffer = DataParallelBuffer()
    buffer.init_data(torch.full((10,), float("nan")))
    assert not buffer.data.any()
    for _ in range(2):
        bucket = buffer.fetch_bucket().data
        assert not bucket[[4, 5, 8, 9]].any() and bucket[[1, 7]].eq(5).all() and bucket[[0, 2, 3, 6]].isnan().all()


def test_wrong_settings_are_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="weights: format: expected lossless, exact, "):
            zcomm.megatron.install(weights="losless")
        zcomm.megatron.install(weights="lossless")
        with pytest.raises(RuntimeError, match=r"expected .*weights='lossless'.* as before, got .*weights=None"):
            zcomm.megatron.install()
        with pytest.raises(ValueError, match="weights: expected parameters of 16 bits, or bytes, with 'lossless'"):
            BucketGroup(torch.float32).start_param_sync()

    run(body)


def test_another_backend_is_refused() -> None:
    """Megatron would keep the group, and nothing would be compressed."""

    def body() -> None:
        with pytest.raises(ValueError, match=r"expected the backend 'zcomm'.* got 'gloo'"):
            zcomm.megatron.install()

    run(body, backend="gloo")


def test_a_release_without_the_manager_is_refused() -> None:
    def body() -> None:
        del megatron()._coalescing_manager
        with pytest.raises(ImportError, match=r"expected megatron.core.distributed.param_and_grad_buffer to import"):
            zcomm.megatron.install()

    run(body, 1)


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16, lossless": {"weights": "lossless"},
    "overlapped averages in bfloat16": {"overlap": True, "average": True, "reduce_in_float32": False},
    "no distributed optimizer": {"distributed_optimizer": False},
    "tensor and sequence parallel": {"tensor_parallel": 2},
    "pipeline parallel": {"pipeline_parallel": 2},
    "expert parallel": {"expert_parallel": 2},
    "optimizer instances": {"instances": 2},
    "sums of all-to-alls": {"float32_accumulation": True, "reduce_in_float32": False, "bucket": 10**9},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_megatron_core_trains_as_over_gloo(case: str, tmp_path: Path) -> None:
    """No byte of weights and gradients stays exact, no byte of activations is compressed."""
    losses, counters = train("megatron_core_job.py", CASES[case], tmp_path)
    assert losses["zcomm"] == pytest.approx(losses["gloo"], rel=0.01)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    carriers = {"expert parallel": ("data", "experts' data"), "optimizer instances": ("data", "instances")}
    for group in carriers.get(case, ("data",)):
        moved = [counters[group][name] for name in names]
        assert sum(one["calls"] for one in moved) > 0, group
        assert all(reason in ("min_bytes", "not_a_float", "operation") or one["exact"][reason]["bytes"] < 1e4
                   for one in moved for reason in one["exact"]), (group, moved)  # fmt: skip
    for group in ("tensor", "pipeline", "experts"):
        assert sum(counters[group][name]["calls"] for name in names) == 0, group


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "outer"), [(0, None), (1, None), (2, None), (3, None), (3, 0), (3, 1)])
def test_megatron_fsdp_trains_as_over_gloo(strategy: int, outer: int | None, tmp_path: Path) -> None:
    """In one group, or in pairs that are replicas (0) or shards of the optimizer (1, HFSDP)."""
    losses, counters = train("megatron_fsdp_job.py", {"strategy": strategy, "outer": outer}, tmp_path)
    assert losses["zcomm"] == pytest.approx(losses["gloo"], rel=0.01)
    for group in ("dp", "outer") if outer is not None else ("dp",):
        moved = {name: counters[group][name] for name in ("all_gather", "reduce_scatter", "all_reduce")}
        assert sum(one["calls"] for one in moved.values()) > 0, group
        for name, one in moved.items():
            left = {reason: calls["bytes"] for reason, calls in one["exact"].items()}
            if group == "outer":  # without main weights the optimizer steps what is gathered in place
                left.pop("in_place", None)
            assert sum(left.values()) < 1e5, (group, name, left)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("saves", ["zcomm", "gloo"])
def test_a_checkpoint_of_megatron_core_resumes_over_the_other_backend(saves: str, tmp_path: Path) -> None:
    """Masters and moments are saved exactly: the losses go on as without the change of backends."""
    loads = "gloo" if saves == "zcomm" else "zcomm"
    (tmp_path / "checkpoint").mkdir()
    launch("megatron_core_job.py", {"save": str(tmp_path / "checkpoint")}, saves, tmp_path)
    resumed, _ = launch("megatron_core_job.py", {"load": str(tmp_path / "checkpoint")}, loads, tmp_path)
    wanted, _ = launch("megatron_core_job.py", {"load": str(tmp_path / "checkpoint")}, saves, tmp_path)
    assert resumed == pytest.approx(wanted, rel=0.01)
    assert resumed[1] < 0.8 * resumed[0]  # the first step is made before the checkpoint is loaded


def train(program: str, settings: dict[str, Any], folder: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run a job of four ranks over gloo and over zcomm; return the losses, and a rank's counters by group."""
    over_gloo, _ = launch(program, settings, "gloo", folder)
    losses, counters = launch(program, settings, "zcomm", folder)
    return {"gloo": over_gloo, "zcomm": losses}, counters


def launch(program: str, settings: dict[str, Any], backend: str, folder: Path) -> tuple[list[float], dict[str, Any]]:
    packages = os.environ.get("TESTS_MEGATRON")
    if not packages:
        pytest.skip("Megatron is not here: make test-slow downloads it")
    out = folder / f"{backend}.json"
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([packages, str(ROOT / "tests")]),
        "ZCOMM_NODE_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    job = [str(ROOT / "tests" / "support" / program), json.dumps(settings | {"backend": backend, "out": str(out)})]
    subprocess.run([*command, *job], env=env, check=True, timeout=300, capture_output=True)
    found = json.loads(out.read_text())
    return found["losses"], found["counters"]
