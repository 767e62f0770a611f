"""What the model says of calls on GPUs, and how it agrees with what others have measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import gpu_model
from zcomm_bench.planner import Cluster, Figure, Option, Workload, collectives, report, step
from zcomm_bench.planner.cluster import inter_link, intra_link, processor
from zcomm_bench.planner.workload import from_config

CALLS = {
    "all_gather": (collectives.gather, gpu_model.GATHER),
    "reduce_scatter": (collectives.reduce, gpu_model.REDUCE),
}
NVLINK_400 = gpu_model.MACHINES["2x8, NVLink, 400 Gbit/s"]


def seconds(collective: str, machine: Cluster, mebibytes: int) -> float:
    call, format = CALLS[collective]
    return call(mebibytes << 19, "bfloat16", format, machine).seconds


def exact_seconds(machine: Cluster, mebibytes: int) -> float:
    return collectives.exact(mebibytes << 19, "bfloat16", machine).seconds


def test_a_call_without_bytes_takes_the_time_of_its_launches() -> None:
    """Computed by hand: one chunk of one hop is two kernels, a group, and its wait."""
    fast = gpu_model.cluster(1, 8, "1000000GB/s", 400)
    launch = fast.launch
    queued = launch.kernel + 2 * launch.event + launch.group + 14 * launch.message
    moved = queued + fast.intra.start_seconds(14)
    assert collectives.reduce(1 << 10, "bfloat16", gpu_model.REDUCE, fast).seconds == pytest.approx(
        moved + launch.start, rel=1e-3
    )


def test_the_slower_link_decides_long_calls() -> None:
    slow = gpu_model.cluster(2, 8, "nvlink4", 1)
    cost = collectives.gather(1 << 28, "bfloat16", gpu_model.GATHER, slow)
    assert cost.inter_bytes / slow.inter.rate < cost.seconds < 1.05 * cost.inter_bytes / slow.inter.rate


def test_sends_to_one_other_node_have_four_channels() -> None:
    """Of 14 GB/s each, so 56 of the 90 GB/s that a link of 800 Gbit/s has for large messages. Several peers share no
    channel, and NCCL's own rings, which are exact calls, have others."""

    def rate(machine: Cluster) -> float:
        cost = collectives.reduce(1 << 28, "bfloat16", "int8:128", machine)
        between = cost.inter_bytes / machine.ranks_per_node
        return between / cost.wire / 1e9

    def fast_inside(nodes: int, gbit: int = 800) -> Cluster:
        machine = gpu_model.cluster(nodes, 8, "1GB/s", gbit)
        return replace(machine, intra=replace(machine.intra, bandwidth=Figure(1e15, "measured")))

    assert rate(fast_inside(2)) == pytest.approx(56, rel=1e-3)
    assert rate(fast_inside(2, gbit=400)) == pytest.approx(45, rel=1e-3)
    for nodes in (3, 16):
        assert rate(fast_inside(nodes)) == pytest.approx(90, rel=1e-3)
    measured = replace(fast_inside(2).inter, bandwidth=Figure(8 * 100e9, "measured"))
    assert rate(replace(fast_inside(2), inter=measured)) == pytest.approx(90, rel=1e-3)
    exact = collectives.exact(1 << 28, "bfloat16", fast_inside(2))
    assert exact.inter_bytes / 8 / exact.wire / 1e9 == pytest.approx(90, rel=1e-3)
    exchange = collectives.all_to_all(1 << 28, "bfloat16", "int8:128", fast_inside(2))
    assert exchange.inter_bytes / 8 / exchange.wire / 1e9 == pytest.approx(90, rel=1e-3)
    assert gpu_model.cluster(2, 72, "nvlink5", 800).rate_between(1) == 72 * 4 * 14e9


def test_sends_inside_a_node_have_all_channels_of_its_communicator() -> None:
    """Computed by hand: 16 of 22 GB/s each, and 32 from NVLink 5 on."""

    def rate(nodes: int, ranks: int, intra: str = "nvlink4") -> float:
        return gpu_model.cluster(nodes, ranks, intra, 400).rate_inside / 1e9

    assert [rate(1, 8), rate(2, 8), rate(8, 8), rate(2, 4)] == [352] * 4
    assert [rate(1, 72, "nvlink5"), rate(2, 72, "nvlink5"), rate(2, 16, "nvlink5")] == [704] * 3
    assert rate(2, 2, "pcie4") == pytest.approx(0.8 * 32)
    machine = gpu_model.cluster(2, 2, "nvlink4", 400)
    cost = collectives.gather(1 << 28, "bfloat16", gpu_model.GATHER, machine)
    assert cost.intra_bytes / cost.wire / 1e9 <= 352
    measured = replace(machine.intra, bandwidth=Figure(300e9, "measured"))
    assert replace(machine, intra=measured).rate_inside == measured.rate


@pytest.mark.parametrize("wait", [0.0, gpu_model.PRODUCT_WAIT], ids=["alone", "beside"])
@pytest.mark.parametrize("collective", CALLS)
@pytest.mark.parametrize("machine", gpu_model.MACHINES)
def test_default_chunks_are_nearly_the_best(collective: str, machine: str, wait: float) -> None:
    """More would overlap better where nothing else runs, and wait longer beside matrix products."""
    hardware = replace(gpu_model.MACHINES[machine], product_wait=wait)
    for mebibytes in gpu_model.MEBIBYTES:
        slot_bytes = (mebibytes << 20) // hardware.ranks
        others = [
            seconds(collective, replace(hardware, chunk_bytes=max(slot_bytes // num_chunks, 512)), mebibytes)
            for num_chunks in (1, 2, 3, 4, 6, 8, 12, 16)
        ]
        assert seconds(collective, hardware, mebibytes) <= 1.2 * min(others)


@pytest.mark.parametrize("machine", gpu_model.MACHINES.values(), ids=gpu_model.MACHINES)
@pytest.mark.parametrize("mebibytes", [1, 128, 256, 1024, 4096])
def test_an_all_reduce_is_never_slower_than_its_two_parts(machine: Cluster, mebibytes: int) -> None:
    size, formats = mebibytes << 19, gpu_model.REDUCE
    one = collectives.all_reduce(size, "bfloat16", formats, machine).seconds
    parts = collectives.reduce(size, "bfloat16", formats, machine).seconds
    parts += collectives.gather(size, "bfloat16", formats.partition("/")[0], machine).seconds
    assert one <= 1.001 * parts


@pytest.mark.parametrize(
    ("machine", "least", "most"),
    [
        ("8, NVLink", 128, 1024),
        ("2x8, NVLink, 400 Gbit/s", 64, 1024),
        ("2x8, NVLink, 100 Gbit/s", 16, 1024),
        ("16x8, NVLink, 400 Gbit/s", 1, 256),
        ("16x8, NVLink, 100 Gbit/s", 1, 1024),
        ("8, PCIe 4", 4, 1024),
        ("2x8, PCIe 4, 100 Gbit/s", 4, 1024),
    ],
)
def test_of_the_advised_sizes_no_call_is_slower_than_exact(machine: str, least: int, most: int) -> None:
    """docs/performance.md advises `min_bytes` of the least."""
    hardware = gpu_model.MACHINES[machine]
    for mebibytes in (size for size in gpu_model.MEBIBYTES if least <= size <= most):
        for collective in CALLS:
            assert seconds(collective, hardware, mebibytes) <= 1.05 * exact_seconds(hardware, mebibytes)


def test_large_calls_gain_between_two_nodes_over_100_gbit() -> None:
    machine = gpu_model.MACHINES["2x8, NVLink, 100 Gbit/s"]
    for mebibytes in (256, 1024):
        assert exact_seconds(machine, mebibytes) >= 2.7 * seconds("all_gather", machine, mebibytes)
        assert exact_seconds(machine, mebibytes) >= 3.2 * seconds("reduce_scatter", machine, mebibytes)


def test_a_layer_of_a_large_model_over_64_nodes() -> None:
    machine = gpu_model.SCALE["64x8"]
    size = from_config(gpu_model.LLAMA_70B, sequence=4096)[0][0].num_elements
    gather = collectives.gather(size, "bfloat16", gpu_model.GATHER, machine).seconds
    reduce = collectives.reduce(size, "float32", gpu_model.REDUCE, machine).seconds
    assert collectives.exact(size, "bfloat16", machine).seconds >= 2 * gather
    assert collectives.exact(size, "float32", machine).seconds >= 4 * reduce


@pytest.mark.parametrize("name", gpu_model.SCALE)
def test_the_planner_says_the_same_of_every_size_of_cluster(name: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from zcomm_bench.cli import app

    machine, config = gpu_model.SCALE[name], tmp_path / "config.json"
    config.write_text(json.dumps(gpu_model.LLAMA_70B))
    shape = ["--nodes", f"{machine.nodes}", "--gpus-per-node", f"{machine.ranks_per_node}"]
    hardware = ["--intra", "nvlink5", "--gpu", "b200"] if name == "1x72" else ["--intra", "nvlink4", "--gpu", "h100"]
    hardware += ["--inter", f"{400 * machine.ranks_per_node}gbit"]
    result = CliRunner().invoke(app, ["plan", "--json", "--model", str(config), *shape, *hardware])
    assert result.exit_code == 0, result.output
    made = next(each for each in json.loads(result.output)["options"] if each["option"]["name"] == step.OPTIONS[2].name)
    work = Workload(*from_config(gpu_model.LLAMA_70B, sequence=4096), tokens=4096)
    gathers = [collectives.gather(unit.num_elements, "bfloat16", gpu_model.GATHER, machine) for unit in work.units]
    reductions = [collectives.reduce(unit.num_elements, "float32", gpu_model.REDUCE, machine) for unit in work.units]
    times = {
        "all_gather": [work.gathers(unit) for unit in work.units],
        "reduce_scatter": [work.reductions * unit.count for unit in work.units],
    }
    for name, costs in (("all_gather", gathers), ("reduce_scatter", reductions)):
        expected = sum(cost.seconds * number for cost, number in zip(costs, times[name], strict=True))
        assert made["costs"][name]["seconds"] == pytest.approx(expected, rel=0.05)


# Published for nodes of 8 H100 with 8 x 400 Gbit/s. Their sizes are not: 8 GiB is what
# nccl-tests ends at in its examples.
BUS_BANDWIDTHS = {4: 360, 8: 345, 16: 320, 32: 300, 64: 280, 128: 260}  # GB/s of reduce-scatters, nccl#1229


@pytest.mark.parametrize(("nodes", "published"), BUS_BANDWIDTHS.items())
def test_exact_calls_reach_the_published_bus_bandwidths(nodes: int, published: float) -> None:
    num_bytes, machine = 8 << 30, gpu_model.cluster(nodes, 8, "nvlink4", 400)
    reached = num_bytes * (machine.ranks - 1) / machine.ranks / exact_seconds(machine, num_bytes >> 20) / 1e9
    assert reached == pytest.approx(published, rel=0.09)


LLAMA_13B = {
    **gpu_model.LLAMA_70B,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "vocab_size": 32000,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "intermediate_size": 13824,
}


@pytest.mark.parametrize("overlap", [step.OVERLAP, Figure(1.0)], ids=["half", "full"])
def test_nothing_is_promised_where_calls_are_hidden(overlap: Figure) -> None:
    """13B on 2 nodes of 4 H200 each: 14.81 s for 524,288 tokens, and 97 % of that speed on 40 nodes (KempnerForge)."""
    machine = Cluster(2, 4, intra_link("nvlink4"), inter_link("1600gbit"), processor("h200"))
    work = Workload(*from_config(LLAMA_13B, sequence=4096), tokens=65_536)
    machine = step.calibrate_step(work, machine, 14.81, overlap)
    plan = report.make(work, machine, step.OPTIONS, overlap)
    assert plan.advice.startswith("Stay exact")
    for prediction in plan.predictions:
        assert plan.speedup(prediction) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", gpu_model.SCALE)
def test_beside_products_a_layer_of_a_large_model_is_no_slower(name: str) -> None:
    machine = replace(gpu_model.SCALE[name], product_wait=gpu_model.PRODUCT_WAIT)
    size = from_config(gpu_model.LLAMA_70B, sequence=4096)[0][0].num_elements
    gather = collectives.late_gather(size, "bfloat16", gpu_model.GATHER, machine).seconds
    reduce = collectives.reduce(size, "float32", gpu_model.REDUCE, machine).seconds
    assert gather <= 1.06 * collectives.exact(size, "bfloat16", machine).seconds
    assert 1.1 * reduce <= collectives.exact(size, "float32", machine).seconds


def test_compressing_costs_a_step_that_hides_its_calls() -> None:
    """The codec's kernels take time from the computing."""
    work = Workload(*from_config(gpu_model.LLAMA_70B, sequence=4096), tokens=4096)
    option = Option("weights and gradients", gpu_model.GATHER, gpu_model.REDUCE)
    hidden = [step.predict(each, work, NVLINK_400, Figure(1.0)) for each in (Option("exact"), option)]
    codec = sum(cost.codec for cost in hidden[1].costs.values())
    taken = codec * NVLINK_400.compute.taken_share.value
    assert hidden[1].step_seconds - hidden[0].step_seconds == pytest.approx(taken)


def test_what_the_codec_takes_is_what_fused_calls_spare() -> None:
    """Beside 2K tokens or more, steps that hide all their calls lose 12 % at most; 4 % beside 4K or more."""
    rows = [line.split("|") for line in gpu_model.steps()][2:]
    assert all(float(row[-2]) >= (0.88 if int(row[2]) < 4096 else 0.96) for row in rows if int(row[2]) >= 2048), rows


def test_a_pulled_call_without_bytes_takes_two_kernels_and_a_flag() -> None:
    fast = gpu_model.cluster(1, 8, "1000000GB/s", 400)
    launch = fast.launch
    seconds = launch.kernel + launch.start + fast.intra.hop.value + launch.start
    assert collectives.reduce(1 << 10, "float32", gpu_model.REDUCE, fast, gpu_model.pulled).seconds == pytest.approx(
        seconds, rel=1e-3
    )


@pytest.mark.parametrize("name", ["1x8", "2x8", "8x8"])
def test_pull_kernels_gain_on_small_calls_and_in_one_node_not_on_large_ones(name: str) -> None:
    machine = gpu_model.SCALE[name]

    def gain(mebibytes: int) -> float:
        size = mebibytes << 18
        over_nccl, pulled = (
            collectives.reduce(size, "float32", gpu_model.REDUCE, machine, time).seconds
            for time in (collectives.timed, gpu_model.pulled)
        )
        return over_nccl / pulled

    assert gain(4) > 1.5 and gain(64) > 1.25 and gain(1024) < 1
