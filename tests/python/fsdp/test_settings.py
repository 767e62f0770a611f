"""How long settings for FSDP2 hold, and for which modules."""

from __future__ import annotations

import copy
import gc
import pickle

import torch
from support.calls import logged
from support.expected import assert_same_bits
from support.fsdp_model import NODES, WIDTH, Block, expected_of, gathered, sharded, whole
from support.training import make_model
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm.fsdp import compress


def test_disable_gives_the_bits_of_before_and_a_later_call_has_the_last_word() -> None:
    def body() -> None:
        model = sharded()
        before = gathered(model)
        first = compress(model, weights="int4:32")
        second = compress(model[0], weights="exact")
        assert any(not torch.equal(value, before[name]) for name, value in gathered(model).items())
        first.disable()
        assert_same_bits(gathered(model)["0.up.weight"], whole(model[0].up.weight))
        second.disable()
        for name, value in gathered(model).items():
            assert_same_bits(value, before[name])
        assert str(first) == "no modules"

    run(body, 2, options=options())


def test_settings_of_a_part_leave_those_of_parts_that_are_sharded_later() -> None:
    """Nobody keeps what compress() returned."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
        fully_shard(model[1])
        compress(model, weights="int4:64", exempt=())
        compress(model[1], weights="int8:256", exempt=())
        gc.collect()
        for part in (model[0], model):
            fully_shard(part)
        values = gathered(model)
        for name, parameter in model.named_parameters():
            assert_same_bits(values[name], expected_of(parameter, "int4:64" if name[0] == "0" else "int8:256"))

    run(body, 4, nodes=NODES, options=options())


def test_a_model_with_settings_can_be_saved_before_its_first_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compress(model)
    values = torch.ones(1, 4)
    assert torch.equal(pickle.loads(pickle.dumps(model))(values), model(values))


def test_a_copy_made_before_fully_shard_is_told_to_have_no_settings() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        compress(model, weights="exact", gradients="exact")
        other, plain = copy.deepcopy(model), copy.deepcopy(model)
        lines = logged()
        plain(torch.ones(1, 256))  # not sharded
        for each in (model, other):
            for layer in [*each, each]:
                fully_shard(layer)
            for _ in range(2):
                each(torch.ones(1, 256))
            assert len(lines) == (0 if each is model else 1), lines
        assert "a copy of the FSDPSequential that zcomm.fsdp.compress was called with" in lines[0]
        compress(other)
        other(torch.ones(1, 256))
        assert len(lines) == 1

    run(body, 2, options=options())


def test_a_later_call_for_a_part_holds_though_the_part_is_met_first() -> None:
    def body() -> None:
        model = make_model()
        whole = zcomm.fsdp.compress(model, weights="int8:256", exempt=())
        part = zcomm.fsdp.compress(model[0], weights="exact", exempt=())
        for block in [*model, model]:
            fully_shard(block)
        for compression in (part, whole):
            compression._install()
        assert "0" not in whole.stats() and len(part.stats()) == 1

    run(body, 2, nodes=[0, 1], options=options(min_bytes=1))
