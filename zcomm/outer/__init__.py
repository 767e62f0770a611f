"""The outer step of training at several sites, as in DiLoCo (https://arxiv.org/abs/2311.08105).

    outer = zcomm.outer.OuterStep(
        torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), every=100, fragments=4, delay=10
    )
    for batch in batches:
        ...
        optimizer.step()
        outer.step()

Each site trains by itself. Every ``every`` inner steps the sites average how far they went, in few bits, and the outer
optimizer makes one step along that mean. docs/outer.md is the guide.
"""

from zcomm.outer.sites import Sites
from zcomm.outer.stats import OuterStats
from zcomm.outer.step import OuterStep

__all__ = ["OuterStats", "OuterStep", "Sites"]
