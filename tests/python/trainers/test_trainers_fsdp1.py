"""FSDP1: which of its calls are compressed by default, and what its opt-in reaches beyond training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.expected import HALF_STEP
from support.trainers import fsdp1
from support.training import loss_of, make_model, plain
from support.worlds import options, run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import zcomm


def test_by_default_gradients_alone_are_compressed() -> None:
    def body() -> None:
        model = fsdp1()()
        loss_of(model, dist.get_rank()).backward()
        stats = zcomm.stats()
        assert stats.all_gather.calls == 0 and stats.all_gather.exact["form"].calls >= 3  # three parts
        assert stats.reduce_scatter.calls == 3

    run(body, 2, options=options())


def test_weights_of_odd_sizes_are_gathered_within_half_a_step() -> None:
    """The padding between them is not part of the scale of a block."""

    def body() -> None:
        model = fsdp1()()
        loss_of(model, dist.get_rank())  # FSDP1 makes up its mind at the first forward pass
        gathered = []
        for format in ("exact", "int8:256"):
            with zcomm.override(all_gather=format), FullyShardedDataParallel.summon_full_params(model):
                gathered.append({name: parameter.clone() for name, parameter in model.named_parameters()})
        exact, compressed = gathered
        error = max(float((compressed[name] - exact[name]).abs().max()) for name in exact)
        largest = max(float(tensor.abs().max()) for tensor in exact.values())
        assert 0 < error <= largest / 127 * HALF_STEP * 1.001

    run(body, 3, options=options(forms="in_place,list"))


def test_with_its_gathers_compressed_a_full_state_dict_is_exact_inside_exact() -> None:
    """FSDP1 gathers a full state dict by the calls that gather its weights in training."""

    def body() -> None:
        model = fsdp1()()
        states = []
        for format in ("exact", "int8:256"):
            with zcomm.override(all_gather=format):
                states.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        want = make_model().state_dict()
        if dist.get_rank() == 0:
            exact, compressed = ({plain(key): value for key, value in state.items()} for state in states)
            assert all(torch.equal(exact[key], value) for key, value in want.items())
            assert not all(torch.equal(compressed[key], value) for key, value in want.items())

    run(body, 2, options=options(forms="in_place,list"))
