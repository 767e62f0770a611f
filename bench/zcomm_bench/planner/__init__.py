"""Predicts training steps with and without compression: ``python -m zcomm_bench plan``.

The model is analytical: bytes over bandwidth for each hop, plus latency, plus the codec's passes over memory. Its
errors against published training steps and measured collectives are on the page docs/planning.md.
"""

from zcomm_bench.planner.cluster import Cluster, Compute, Figure, Link
from zcomm_bench.planner.step import OPTIONS, Option, Prediction, predict
from zcomm_bench.planner.workload import Workload

__all__ = ["OPTIONS", "Cluster", "Compute", "Figure", "Link", "Option", "Prediction", "Workload", "predict"]
