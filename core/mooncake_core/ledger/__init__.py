"""The ledger: what is promised to each instance and not yet finished."""

from mooncake_core.ledger.contract import InstanceLoad, Ledger, Limits, RefusalReason, Reservation

__all__ = ["InstanceLoad", "Ledger", "Limits", "RefusalReason", "Reservation"]
