"""Cost models: what a prefill, a transfer and a decode step are predicted to take."""

from mooncake_scheduler.conductor.cost.fitting import CostFitting
from mooncake_scheduler.conductor.cost.model import CostModel, CostModels, class_of
from mooncake_scheduler.conductor.cost.pace import Computed, PrefillPace, Sent
from mooncake_scheduler.conductor.cost.transfers import TransferFitting

__all__ = [
    "Computed",
    "CostFitting",
    "CostModel",
    "CostModels",
    "PrefillPace",
    "Sent",
    "TransferFitting",
    "class_of",
]
