"""Predicts training steps with and without compression: ``python -m zcomm_bench plan``.

Calls are timed by their own schedule: the steps of a rank's codec and transport, and what each takes. The errors
against published training steps and measured collectives are on the page docs/planning.md.
"""

from zcomm_bench.planner.cluster import Cluster, Compute, Figure, Link
from zcomm_bench.planner.step import OPTIONS, Option, Prediction, predict
from zcomm_bench.planner.workload import Workload

__all__ = ["OPTIONS", "Cluster", "Compute", "Figure", "Link", "Option", "Prediction", "Workload", "predict"]
