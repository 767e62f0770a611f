"""Confirms or refutes every claim of the project on a cluster: ``python -m zcomm_bench prove``, see docs/prove.md.

``stages`` is what ranks run: it takes raw samples. All else works on a report's samples, and needs no torch: figures
and verdicts follow from them alone, so that anyone can compute them again.
"""
