"""The ledger: what is promised to each instance and not yet finished."""

from mooncake_core.ledger.contract import InstanceLoad, Ledger, Limits, RefusalReason, Reservation
from mooncake_core.ledger.memory import MemoryLedger

__all__ = ["InstanceLoad", "Ledger", "Limits", "MemoryLedger", "RefusalReason", "Reservation"]
