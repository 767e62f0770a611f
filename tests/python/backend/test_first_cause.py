"""What ranks say of a failure: its first cause in one sentence, whatever way it came to them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from support.calls import gather, mine, scatter
from support.worlds import options, run

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of

SENTENCE = r"""ranks called different things: rank \d "([^"]+)", rank \d ("[^"]+"|the same with other segments)$"""


def assert_one_sentence(message: str) -> None:
    """It names both ranks and both calls. It has no hash, and does not say which rank told which."""
    assert re.search(SENTENCE, message), message
    assert message.count("called different things") == 1 and not re.search("gave up|lost rank|#", message), message


@pytest.mark.promise(8)
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]], ids=str)
def test_all_ranks_hear_the_first_cause_alone(nodes: list[int]) -> None:
    """Those that exchange nothing with a rank that differs, too, through memory of a node and over Gloo."""

    def body() -> tuple[str, str]:
        gather(mine(64))
        with pytest.raises(RuntimeError) as raised:
            gather(mine()) if dist.get_rank() != 1 else scatter(mine(4 * 64))
        with pytest.raises(RuntimeError) as again:
            gather(mine(64))
        return str(raised.value), str(again.value)

    for message, again in run(body, 4, nodes=nodes, options=options(min_bytes=1)):
        assert_one_sentence(message)
        assert_one_sentence(again)
        assert "all_gather" in message and "reduce_scatter" in message and "rank 1" in message, message


def test_segments_that_differ_have_no_numbers_that_nobody_knows() -> None:
    def body() -> str:
        shard, whole = mine(256), torch.empty(512)
        numels = [100, 156] if dist.get_rank() else [156, 100]
        plan = backend_of().plan(whole, shard, parts=[(numels[0], False), (numels[1], True)])
        assert isinstance(plan, _c10d.Operation)
        with pytest.raises(RuntimeError) as raised:
            plan.run(whole, shard).wait()
        return str(raised.value)

    for message in run(body, 2, options=options(min_bytes=1)):
        assert_one_sentence(message)
