"""Cost models: what a prefill, a transfer and a decode step are predicted to take."""

from mooncake_scheduler.conductor.cost.fitting import CostFitting
from mooncake_scheduler.conductor.cost.model import CostModel, CostModels, class_of

__all__ = ["CostFitting", "CostModel", "CostModels", "class_of"]
