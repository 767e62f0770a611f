"""Predicts training steps with and without compression: ``python -m zcomm plan``.

The model is analytical: bytes over bandwidth for each hop, plus latency, plus the codec's passes over memory. Its
errors against published training steps and measured collectives are printed by ``python -m zcomm plan --validate``.
"""

from zcomm.planner.cluster import Cluster, Compute, Figure, Link
from zcomm.planner.step import OPTIONS, Option, Prediction, predict
from zcomm.planner.workload import Workload

__all__ = ["OPTIONS", "Cluster", "Compute", "Figure", "Link", "Option", "Prediction", "Workload", "predict"]
