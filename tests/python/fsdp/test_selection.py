"""Parameters that are chosen to be sent exactly."""

from __future__ import annotations

from typing import Any

import pytest
from support.fsdp_model import WIDTH, Block, sharded
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import fully_shard

from zcomm.fsdp import compress, one_dimensional, smaller_than


def test_parameters_are_chosen_by_name_type_size_and_function() -> None:
    def body() -> None:
        model = sharded()

        def exempt_of(*exempt: Any) -> list[int]:
            compression = compress(model, exempt=exempt)
            return [one.exempt_elements for one in compression.stats().values()]

        norm, up, down, head = 2 * WIDTH, 2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH, 3 * WIDTH
        assert exempt_of() == [0, 0, 0]
        assert exempt_of(one_dimensional) == [norm + 3 * WIDTH, norm + 3 * WIDTH, 3]
        assert exempt_of("0.up.weight") == [up, 0, 0]
        assert exempt_of(nn.LayerNorm) == [norm, norm, 0]
        assert exempt_of(Block, "2.*") == [norm + up + down + 3 * WIDTH] * 2 + [head + 3]
        assert exempt_of(smaller_than(head + 1)) == [norm + 3 * WIDTH, norm + 3 * WIDTH, head + 3]
        assert exempt_of(lambda name, parameter: name == "2.weight" and parameter.shape == (3, WIDTH)) == [0, 0, head]

    run(body, 2, options=options())


def test_a_shared_parameter_is_chosen_by_any_of_its_names() -> None:
    def body() -> None:
        for selector in ("head.*", nn.Linear, "embedding.*"):
            model = nn.Sequential()
            model.embedding, model.other = nn.Embedding(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)
            model.head = nn.Linear(WIDTH, WIDTH, bias=False)
            model.head.weight = model.embedding.weight
            (traffic,) = compress(fully_shard(model), exempt=[selector]).stats().values()
            assert (traffic.elements, traffic.exempt_elements) == (2 * WIDTH**2, WIDTH**2)

    run(body, 2, options=options())


def test_a_shared_module_is_chosen_by_any_of_its_names() -> None:
    def body() -> None:
        for selector in ("first.*", "second.*", "shared.*"):
            model = nn.Sequential()
            model.shared = nn.Embedding(WIDTH, WIDTH)
            model.first, model.second = nn.Sequential(), nn.Sequential()
            model.first.embedding = model.second.embedding = model.shared
            model.other = nn.Linear(WIDTH, WIDTH, bias=False)
            (traffic,) = compress(fully_shard(model), exempt=[selector]).stats().values()
            assert (traffic.elements, traffic.exempt_elements) == (2 * WIDTH**2, WIDTH**2)

    run(body, 2, options=options())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected Module, got list"):
        compress([nn.Linear(2, 2)])  # type: ignore[arg-type]
