"""``python -m zcomm_bench plan``: what it prints and draws, and which arguments it refuses."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from support.model_configs import GPT2, LLAMA_8B
from typer.testing import CliRunner

from bench import gpu_model
from zcomm.distributed.decisions import SCHEMA
from zcomm_bench.cli import app
from zcomm_bench.planner.cluster import processor


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config, picture = tmp_path / "config.json", tmp_path / "plan.png"
    config.write_text(json.dumps(LLAMA_8B))
    arguments = ["plan", "--model", str(config), "--inter", "25gbit", "--json", "--plot", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(result.output)
    assert made["use"] == "exact weights by differences"
    assert made["cluster"]["inter"]["bandwidth"] == {"value": 3.125e9, "source": "given"}
    assert picture.stat().st_size > 10_000
    table = CliRunner().invoke(app, arguments[:5])
    assert table.exit_code == 0, table.output
    assert "(assumed)" in table.output
    assert "(given)" in table.output


def test_micro_batches_are_reduced_one_by_one_or_accumulated(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(gpu_model.LLAMA_70B))
    arguments = ["plan", "--model", str(config), "--nodes", "8", "--micro-batches", "8"]
    for more, said in [
        ([], "gradients: reduced in each micro-batch (assumed)"),
        (["--accumulate"], "gradients: accumulated whole, 262.8 GiB per rank (given)"),
    ]:
        result = CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "1000"})
        assert result.exit_code == 0, result.output
        assert said in result.output and ("Does not fit" in result.output) == bool(more)
    made = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["workload"]
    assert (made["micro_batches"], made["accumulate"]) == (8, False)


def test_the_command_takes_a_learning_rate_or_bits(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GPT2))

    def planned(*arguments: str) -> dict:
        result = CliRunner().invoke(app, ["plan", "--json", "--model", str(config), *arguments])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["workload"]["bits_per_weight"]

    assert planned("--bits-per-weight", "2.5") == {"value": 2.5, "source": "given"}
    slow, fast = planned("--learning-rate", "1e-5"), planned("--learning-rate", "1e-3")
    assert slow["value"] < planned()["value"] < fast["value"]
    assert slow["source"] == fast["source"] == "given"
    for arguments, reason in [
        (["--learning-rate", "1e-3", "--bits-per-weight", "2"], "expected it or a learning rate, got both"),
        (["--learning-rate", "-1"], "learning_rate: expected 0 to 1, got -1.0"),
    ]:
        refuses(["--model", str(config), *arguments], reason)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "config.json"),
        (["--model", "nothing.json"], "expected a config.json"),
        (["--model", "x:y"], "model: expected a function"),
        (["--model", "x:y", "--sequence", "8"], "sequence: expected it with a config.json alone"),
        (["--model", "x:y", "--gpu", "h1000"], "Invalid value for '--gpu': gpu: expected one of v100"),
        (["--model", "x:y", "--inter", "fast"], "Invalid value for '--inter': expected a rate"),
        (["--model", "x:y", "--intra", "fast"], "Invalid value for '--intra': expected a rate"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], reason: str) -> None:
    refuses(arguments, reason)


def test_a_cluster_in_a_file(tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "cluster.yaml"
    model.write_text(json.dumps(GPT2))
    file.write_text("json: true\nnodes: 4\ngpus-per-node: 2\ninter: 25gbit\ngpu: a100\n")
    arguments = ["plan", "--model", str(model), "--cluster", str(file)]

    def planned(*more: str) -> dict:
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["cluster"]

    made = planned()
    assert (made["nodes"], made["ranks_per_node"]) == (4, 2)
    assert made["inter"]["bandwidth"] == {"value": 25e9 / 8, "source": "given"}
    assert made["compute"]["peak"]["value"] == processor("a100").peak.value
    assert planned("--nodes", "8")["nodes"] == 8  # the command line has the last word
    for text, message in [("speed: 1", "got speed"), ("[1]", "expected a mapping"), ("a: [", "expected a YAML file")]:
        file.write_text(text)
        refuses(arguments[1:], message)


LINK = {"bytes_per_second": 1e9, "hop_seconds": 1e-5, "exchange_seconds": 1e-5}
CALIBRATION = {"schema": SCHEMA, "nodes": 3, "ranks_per_node": 1, "inter": LINK}


def test_a_calibration_has_the_shape_of_the_cluster(tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "cluster.json"
    model.write_text(json.dumps(GPT2))
    file.write_text(json.dumps(CALIBRATION))

    def planned(*more: str) -> tuple[int, int, str]:
        result = CliRunner().invoke(app, ["plan", "--json", "--model", str(model), *more])
        assert result.exit_code == 0, result.output
        made = json.loads(result.stdout)["cluster"]
        return made["nodes"], made["ranks_per_node"], result.stderr

    assert planned() == (2, 8, "")
    assert planned("--calibration", str(file)) == (3, 1, "")
    assert planned("--calibration", str(file), "--gpus-per-node", "4") == (
        *(3, 4),
        "warning: the calibration is of 3 x 1 ranks, the plan of 3 x 4\n",
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"nodes": "2"}, "nodes: expected a whole number above 0, got '2'"),
        ({"nodes": None}, "nodes: expected a whole number above 0, got None"),
        ({"ranks_per_node": True}, "ranks_per_node: expected a whole number above 0, got True"),
        ({"inter": None}, "inter: expected a measured link, got None"),
        ({"inter": {}}, "inter.bytes_per_second: expected a number above 0, got None"),
        ({"inter": {**LINK, "bytes_per_second": 0}}, "inter.bytes_per_second: expected a number above 0, got 0"),
        ({"inter": {**LINK, "hop_seconds": float("nan")}}, "inter.hop_seconds: expected a number above 0, got nan"),
        ({"ranks_per_node": 2}, "intra: expected a measured link, got None"),
        ({"codec_bytes_per_second": "fast"}, "codec_bytes_per_second: expected a number above 0, got 'fast'"),
    ],
    ids=str,
)
def test_a_calibration_that_measured_nothing_is_refused(wrong: dict, reason: str, tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "cluster.json"
    model.write_text(json.dumps(GPT2))
    file.write_text(json.dumps(CALIBRATION | wrong))
    refuses(["--model", str(model), "--calibration", str(file)], reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "model: expected a config.json, got a list"),
        ({**LLAMA_8B, "hidden_size": "x"}, "hidden_size: expected a whole number above 0, got 'x'"),
        ({**LLAMA_8B, "num_attention_heads": 0}, "num_attention_heads: expected a whole number above 0, got 0"),
        ({**LLAMA_8B, "head_dim": 0.5}, "head_dim: expected a whole number above 0, got 0.5"),
        ({"model_type": "gpt2"}, "n_embd: expected a whole number above 0, got None"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_config_without_sizes_is_refused(content: object, reason: str, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(content))
    refuses(["--model", str(model)], reason)


def test_a_function_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "raising_model.py").write_text(
        "import torch\ndef build():\n    raise KeyError('layers')\nempty = torch.nn.Module\n"
    )
    (tmp_path / "raising_import.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    expected = "model: expected raising_model:{} to return a module"
    refuses(["--model", "raising_model:build"], expected.format("build") + ", got KeyError: 'layers'")
    refuses(["--model", "raising_model:empty"], expected.format("empty") + " with parameters, got none")
    refuses(["--model", "raising_import:build"], "model: expected a function 'raising_import:build': division by zero")


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuses(["--plot", "plan.xyz"], "'--plot': expected a name that ends in .png or .svg or .pdf, got 'plan.xyz'")
    refuses(["--plot", str(tmp_path / "file" / "plan.png")], "Invalid value for '--plot'")


def refuses(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "1000"})
    assert result.exit_code == 2 and reason in result.output, result.output


def test_what_another_option_would_replace_is_refused(tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "cluster.json"
    model.write_text(json.dumps(GPT2))
    file.write_text(json.dumps(CALIBRATION))
    calibrated = ["--calibration", str(file)]
    for arguments, reason in [
        (
            [*calibrated, "--inter", "100gbit"],
            "inter: expected --inter or a --calibration that has this link, got both",
        ),
        (["--share-of-peak", "0.4", "--step-seconds", "1"], "share_of_peak: expected it or --step-seconds, got both"),
    ]:
        refuses(["--model", str(model), *arguments], reason)
    made = CliRunner().invoke(app, ["plan", "--model", str(model), *calibrated, "--intra", "nvlink5", "--json"])
    assert json.loads(made.output)["cluster"]["intra"]["bandwidth"]["value"] == 900e9


def test_a_link_that_nobody_named_is_assumed(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GPT2))
    for more, source in [([], "assumed"), (["--inter", "100gbit"], "given")]:
        result = CliRunner().invoke(app, ["plan", "--json", "--model", str(model), *more])
        assert json.loads(result.output)["cluster"]["inter"]["bandwidth"] == {"value": 12.5e9, "source": source}


def test_the_scale_is_printed_and_in_the_json(tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "cluster.yaml"
    model.write_text(json.dumps(GPT2))
    file.write_text("scale: true\n")
    arguments = ["plan", "--model", str(model), "--cluster", str(file)]
    table = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert table.exit_code == 0, table.output
    assert "as the cluster grows" in table.output
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.output)
    assert [row["ranks"] for row in made["scale"]] == [8 << shift for shift in range(10)]
    used = next(each for each in made["options"] if each["option"]["name"] == made["use"])
    assert {row["option"] for row in made["scale"]} == {made["use"]}
    assert (made["scale"][1]["seconds"], made["scale"][1]["speedup"]) == (used["step_seconds"], used["speedup"])
    assert "scale" not in json.loads(CliRunner().invoke(app, ["plan", "--json", "--model", str(model)]).output)
