"""The planner: its bytes against real worlds, and its advice."""

import dataclasses
import itertools
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from support.model_configs import GPT2, LLAMA_8B

from zcomm import _core
from zcomm._core import CallStats
from zcomm._units import parse_nodes
from zcomm.testing import LocalRank, LocalWorld
from zcomm_bench.planner import (
    Cluster,
    Figure,
    Option,
    Workload,
    collectives,
    lossless,
    report,
    scale,
    step,
)
from zcomm_bench.planner.cluster import ON_HOST, calibrated, inter_link, intra_link, processor
from zcomm_bench.planner.workload import Unit, from_config, load_model


def cluster(nodes: int = 2, ranks_per_node: int = 8, inter: str = "100gbit", gpu: str = "h100") -> Cluster:
    return Cluster(nodes, ranks_per_node, intra_link("nvlink4"), inter_link(inter), processor(gpu))


def workload(config: dict = LLAMA_8B, tokens: int = 4096, **fields: object) -> Workload:
    return Workload(*from_config(config, sequence=4096), tokens, **fields)


@pytest.mark.parametrize(("config", "parameters"), [(LLAMA_8B, 8_030_261_248), (GPT2, 124_439_808)])
def test_parameters_are_those_of_the_published_models(config: dict, parameters: int) -> None:
    assert workload(config).num_parameters == parameters


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "olmo2"])
def test_a_config_that_does_not_say_so_ties_embeddings_as_transformers_does(kind: str) -> None:
    tied = kind in ("gemma", "smollm3")
    assert (
        workload({**LLAMA_8B, "model_type": kind}).num_parameters
        == workload({**LLAMA_8B, "model_type": kind, "tie_word_embeddings": tied}).num_parameters
    )


def test_attention_is_as_wide_as_its_heads() -> None:
    """Of Qwen3-0.6B: 16 heads of 128, and 1024 hidden values."""
    wide = {**LLAMA_8B, "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}
    short, long = (from_config(wide, sequence)[1] for sequence in (1, 2))
    assert long - short == wide["num_hidden_layers"] * 4 * 16 * 128 / 2


def test_a_module_on_the_meta_device_has_the_same_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "tiny_model.py").write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(10, 4)\n"
        "        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))\n"
        "        self.head = nn.Linear(4, 10, bias=False)\n"
        "def build():\n"
        "    return Model()\n"
        "def wrong():\n"
        "    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    units, flops = load_model("tiny_model:build", sequence=8)
    assert units == (Unit("block 0", 20), Unit("block 1", 20), Unit("block 2", 20), Unit("root", 80, gathers=1))
    assert flops == 2 * (3 * 16 + 40)
    with pytest.raises(ValueError, match=r"expected tiny_model:wrong to return a torch.nn.Module, got int"):
        load_model("tiny_model:wrong", sequence=8)
    with pytest.raises(ValueError, match="expected a function 'tiny_model:missing'"):
        load_model("tiny_model:missing", sequence=8)


def test_the_root_is_gathered_once_in_a_micro_batch() -> None:
    """FSDP2 keeps it from the forward to the backward pass."""
    work = workload(micro_batches=3)
    assert [work.gathers(unit) for unit in work.units] == [2 * 3 * LLAMA_8B["num_hidden_layers"], 3]


def test_the_band_holds_other_rates_inside_of_nodes() -> None:
    alone = dataclasses.replace(cluster(nodes=1), intra=intra_link("1GB/s"))
    made = step.predict(step.OPTIONS[0], workload(), alone, Figure(0.5, "given"))
    assert made.low < 0.95 * made.step_seconds and made.high > 1.05 * made.step_seconds


@pytest.mark.parametrize("model", [{"model_type": "t5"}, {"model_type": "mixtral", "num_local_experts": 8}])
def test_a_model_that_is_no_dense_decoder_is_refused(model: dict) -> None:
    with pytest.raises(ValueError, match="MODULE:FUNCTION"):
        from_config(model, sequence=8)


@pytest.mark.parametrize("nodes", ["1x4", "2x2", "4x1", "2x3", "4x2", "8x8", "1x72"])
@pytest.mark.parametrize("num_elements", [1024, 4104, 100_000])
def test_bytes_are_those_that_a_world_sends(nodes: str, num_elements: int) -> None:
    check_bytes(nodes, num_elements)


@pytest.mark.slow
def test_bytes_are_those_that_512_ranks_send() -> None:
    check_bytes("64x8", 512 * 256)


def check_bytes(nodes: str, num_elements: int) -> None:
    num_nodes, local = parse_nodes(nodes)
    hardware = cluster(num_nodes, local)
    shard = collectives.shard(num_elements, hardware)

    def body(rank: LocalRank) -> tuple[CallStats, CallStats]:
        whole, part = np.zeros((rank.size, shard), np.float32), np.zeros(shard, np.float32)
        slots = [(slot.ctypes.data, shard, "float32") for slot in whole]
        own, timeout = (part.ctypes.data, shard, "float32"), timedelta(seconds=60)
        core = rank._core
        gathered = core.run(core.make_all_gather(slots, [(shard, "int8:256")]), [own], slots, timeout)
        reduce = core.make_reduce_scatter(slots, [(shard, "int8:128/int4:128")])
        return gathered, core.run(reduce, slots, [own], timeout)

    calls = LocalWorld(nodes).run(body)
    gather = collectives.gather(num_elements, "float32", "int8:256", hardware)
    scatter = collectives.reduce(num_elements, "float32", "int8:128/int4:128", hardware)
    for number, cost in enumerate((gather, scatter)):
        assert {call[number].intra_node_bytes for call in calls} == {cost.intra_bytes}
        assert sum(call[number].inter_node_bytes for call in calls) == cost.inter_bytes * num_nodes


@pytest.mark.parametrize("nodes", ["1x4", "2x2", "4x1", "2x3", "8x8"])
@pytest.mark.parametrize("num_elements", [1024, 100_000])
def test_bytes_of_lossless_gathers_are_those_that_a_world_sends(nodes: str, num_elements: int) -> None:
    num_nodes, local = parse_nodes(nodes)
    hardware = cluster(num_nodes, local)
    length = collectives.shard(num_elements, hardware)
    before, after = lossless.changed_weights(length, 1e-3)

    def body(rank: LocalRank) -> tuple[CallStats, int, int]:
        whole = np.zeros((rank.size, length), np.uint16)
        slots = [lossless.view_of(slot) for slot in whole]
        gather = rank._core.make_lossless_gather(slots)
        held = np.zeros(gather.secondary_bytes + 64, np.uint8)
        kept = _core.SecondaryShard(held.ctypes.data + -held.ctypes.data % 64, gather.secondary_bytes)
        gather = gather.bound_to(kept)
        for own in (before, after):
            view, timeout = lossless.view_of(own), timedelta(seconds=60)
            sent = rank._core.run(gather, [view], slots, timeout)
        assert (whole == after).all()
        return sent, kept.sent_bytes, gather.secondary_bytes

    calls = LocalWorld(nodes).run(body)
    header_bytes = 64 if num_nodes > 1 else 0  # one chunk
    bits = 8 * (calls[0][1] - header_bytes) / length
    cost = collectives.gather_lossless(num_elements, "bfloat16", bits, hardware)
    assert {call[0].intra_node_bytes for call in calls} == {cost.intra_bytes}
    assert sum(call[0].inter_node_bytes for call in calls) == cost.inter_bytes * num_nodes
    again = collectives.gather_unchanged(num_elements, "bfloat16", hardware)
    assert (again.intra_bytes, again.inter_bytes) == (cost.intra_bytes, 0)
    assert max(call[2] for call in calls) == collectives.secondary_bytes(num_elements, "bfloat16", hardware)


@pytest.mark.parametrize(("learning_rate", "bits"), [(1e-3, 4.83), (3e-4, 3.43), (1e-5, 0.68), (0.0, 0.008)])
def test_bits_at_a_learning_rate_are_those_of_the_docs(learning_rate: float, bits: float) -> None:
    assert lossless.bits_per_weight(learning_rate) == pytest.approx(bits, abs=0.005)


def test_bits_that_nobody_gave_are_those_of_a_learning_rate() -> None:
    assumed = workload().bits_per_weight
    assert assumed.value == pytest.approx(lossless.bits_per_weight(3e-4), abs=0.005)
    assert assumed.source == "assumed"


def test_compression_pays_on_a_slow_link_and_not_on_a_fast_one() -> None:
    slow = report.make(workload(), cluster(inter="25gbit"), step.OPTIONS, step.OVERLAP)
    assert slow.best.option.name == "exact weights by differences"
    assert 'zcomm.fsdp.compress(model, weights="lossless")' in slow.advice
    fast = report.make(workload(tokens=65536), cluster(inter="25.6tbit"), step.OPTIONS, step.OVERLAP)
    assert fast.best is fast.exact
    assert fast.advice.startswith("Stay exact")


def test_tables_over_the_cluster_are_of_the_option_that_is_advised() -> None:
    """Or of the last one, where the advice is to stay exact."""
    rounded = Cluster(2, 8, intra_link("20GB/s"), inter_link("200gbit"), processor("h100"))
    fast, last = cluster(inter="25.6tbit"), step.OPTIONS[-1].name
    for hardware, tokens, name in ((rounded, 4096, "with secondary shards"), (fast, 65536, last)):
        made = report.make(workload(tokens=tokens), hardware, step.OPTIONS, step.OVERLAP)
        assert made.shown.option.name == name
        assert {row["option"] for row in scale.to_json(made)} == {name}


def test_the_picture_names_the_option_that_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    exact, *others = step.OPTIONS
    made = report.make(workload(), cluster(), (exact, *others[::-1]), step.OVERLAP)
    report.plot(made, tmp_path / "plan.png")
    labels = [str(line.get_label()) for line in drawn[0].axes[0].lines]
    assert labels[-1].startswith("exact is as fast as exact weights by differences: ")


def test_headers_of_differences_go_ahead_on_gpus_alone() -> None:
    """On CPUs each goes with its difference, so that no call waits for them."""
    on_gpus = cluster()
    slow = dataclasses.replace(on_gpus.inter, exchange=Figure(1.0))
    for launch, num_starts in ((on_gpus.launch, 1), (ON_HOST, 0)):
        hardware = dataclasses.replace(on_gpus, launch=launch, inter=slow)
        plan = collectives._lossless_plan(collectives._shape(1 << 20, "bfloat16", hardware))
        seconds = collectives.gather_lossless(1 << 20, "bfloat16", 3.4, hardware).seconds
        assert int(seconds) == plan.num_chunks + 1 + num_starts  # a start per chunk, and one of the second hop


def test_what_does_not_fit_is_said() -> None:
    big = {**LLAMA_8B, "hidden_size": 16384, "num_hidden_layers": 96}
    made = report.make(workload(big), cluster(), step.OPTIONS, step.OVERLAP)
    assert made.advice.startswith("Does not fit")
    tight = cluster(inter="10gbit")
    need = [step.memory_of(option, workload(), tight) for option in step.OPTIONS]
    between = (need[-2] + need[-1]) / 2
    tight = dataclasses.replace(tight, compute=dataclasses.replace(tight.compute, memory=Figure(between)))
    made = report.make(workload(), tight, step.OPTIONS, step.OVERLAP)
    assert [each.fits for each in made.predictions] == [True, True, True, True, False]
    assert made.best.option.name == "with secondary shards"


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_difference_is_encoded_once_and_decoded_once_in_every_other_node(nodes: int) -> None:
    hardware = cluster(nodes)
    shard = 100_000
    num_elements = shard * hardware.ranks
    none, byte = (collectives.gather_lossless(num_elements, "bfloat16", bits, hardware).codec for bits in (0.0, 8.0))
    num_shards = nodes if nodes > 1 else 0
    assert (byte - none) * hardware.compute.lossless_rate == pytest.approx(num_shards * shard)


def test_gradients_are_reduced_in_each_micro_batch_or_summed_whole() -> None:
    """FSDP2 keeps the sum unsharded, in the dtype of the reduction, after set_requires_gradient_sync(False)."""
    summed, reduced = (
        workload(micro_batches=2, accumulate=accumulate, reduce_dtype="float32") for accumulate in (True, False)
    )
    for option in step.OPTIONS:
        once, twice = (step.costs_of(option, each, cluster())["reduce_scatter"] for each in (summed, reduced))
        assert (twice.inter_bytes, twice.intra_bytes) == (2 * once.inter_bytes, 2 * once.intra_bytes)
        more = step.memory_of(option, summed, cluster()) - step.memory_of(option, reduced, cluster())
        assert more == 4 * summed.num_parameters
        single = dataclasses.replace(summed, micro_batches=1)
        assert step.memory_of(option, single, cluster()) == step.memory_of(option, reduced, cluster())


def test_exact_weights_are_recommended_where_they_are_as_fast() -> None:
    """Not where int8 is faster by more than the planner's error."""

    def plan(intra: str) -> report.Plan:
        hardware = Cluster(2, 8, intra_link(intra), inter_link("200gbit"), processor("h100"))
        return report.make(workload(), hardware, step.OPTIONS, step.OVERLAP)

    equal, slower = plan("130GB/s"), plan("20GB/s")
    for made in (equal, slower):
        assert made.fastest.option.name == "with secondary shards"
    assert equal.best.option.is_lossless
    assert '"with secondary shards", which rounds weights, is faster by less' in equal.advice
    assert slower.best is slower.fastest


def test_the_band_of_differences_is_wider_where_their_bits_are_assumed() -> None:
    hardware, option = cluster(inter="10gbit"), step.OPTIONS[-1]
    assumed = step.predict(option, workload(), hardware)
    given = step.predict(option, workload(bits_per_weight=Figure(3.43, "given")), hardware)
    assert given.step_seconds == assumed.step_seconds
    assert assumed.low < given.low and given.high < assumed.high


def test_a_measured_step_calibrates_the_compute() -> None:
    fitted = step.calibrate_step(workload(), cluster(), 8.0)
    assert step.predict(step.OPTIONS[0], workload(), fitted).step_seconds == pytest.approx(8.0, rel=1e-6)
    assert fitted.compute.efficiency.source == "measured"
    with pytest.raises(ValueError, match=r"step_seconds: expected between .* got 0\.001"):
        step.calibrate_step(workload(), cluster(), 0.001)


def test_the_band_holds_the_prediction_and_overlap_shortens_the_step() -> None:
    for option in step.OPTIONS:
        made = step.predict(option, workload(), cluster())
        assert made.low < made.step_seconds < made.high
    none, full = (step.predict(Option("exact"), workload(), cluster(), Figure(share)) for share in (0.0, 1.0))
    assert full.step_seconds < none.step_seconds


def test_a_calibration_replaces_what_was_assumed() -> None:
    link = {"bytes_per_second": 1e9, "hop_seconds": 5e-6, "exchange_seconds": 4e-6}
    content = {"inter": link, "codec_bytes_per_second": 1e12, "exact_reduce_factor": 2.0}
    measured = calibrated(cluster(), content)
    assert measured.inter.rate == 1e9
    assert measured.inter.hop == Figure(5e-6, "measured")
    assert measured.intra == cluster().intra
    assert measured.compute.codec_rate == 1e12
    assert measured.compute.lossless_share == cluster().compute.lossless_share
    assert measured.exact_reduce_factor == 2.0
    compute = calibrated(cluster(), {**content, "lossless_bytes_per_second": 3e11}).compute
    assert compute.lossless_rate == pytest.approx(3e11)
    assert compute.lossless_share.source == "measured"


def test_a_hop_of_large_messages_is_assumed_where_that_is_longer_than_the_measured_one() -> None:
    """And the band then holds other ones."""
    option, bands = step.OPTIONS[0], []
    for seconds, source in ((8e-6, "assumed"), (12e-6, "measured")):
        link = {"bytes_per_second": 5e10, "hop_seconds": seconds, "exchange_seconds": 4e-6}
        hardware = calibrated(cluster(64), {"inter": link})
        assert hardware.inter.bulk_hop == Figure(max(seconds, 10e-6), source)
        made = step.predict(option, workload(), hardware, Figure(0.5, "given"))
        known = dataclasses.replace(hardware.inter, bulk_hop=Figure(hardware.inter.bulk_hop.value, "measured"))
        narrow = step.predict(option, workload(), dataclasses.replace(hardware, inter=known), Figure(0.5, "given"))
        bands.append((made.low < narrow.low, made.high > narrow.high))
    assert bands == [(True, True), (False, False)]
    host = calibrated(cluster(), {"backend": "gloo", "inter": {**link, "hop_seconds": 1e-6}})
    assert host.inter.bulk_hop == Figure(1e-6, "measured")


def test_an_overlap_that_is_given_stays() -> None:
    assumed, given = (
        step.predict(Option("exact"), workload(tokens=32768), cluster(), Figure(0.5, source))
        for source in ("assumed", "given")
    )
    assert assumed.low < given.low and given.high < assumed.high


def test_cost_over_the_number_of_nodes() -> None:
    made = report.make(workload(), cluster(ranks_per_node=8), step.OPTIONS, step.OVERLAP)
    points = list(scale.points(made, step.OPTIONS[2]))
    assert [point.ranks for point in points] == [8 << shift for shift in range(10)]
    assert points[0].exact_bytes == points[0].bytes == 0
    assert all(first.bytes <= then.bytes for first, then in itertools.pairwise(points))
    assert points[1].exact_seconds == made.exact.step_seconds
    # A node sends (nodes - 1) / nodes of the whole, and the latency of a ring grows with the ranks.
    assert points[-1].bytes / points[1].bytes == pytest.approx((511 / 512) / (1 / 2), rel=0.01)
