"""Admission: whether a placement is allowed, by the load it is predicted to meet (arXiv 2407.00079 §7).

`rules` says what is asked when; `prefill` and `decode` answer, each for its side of a placement.
"""

from mooncake_scheduler.conductor.admission.rules import Admission

__all__ = ["Admission"]
