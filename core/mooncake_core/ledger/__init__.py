"""The ledger: what is promised to each instance and not yet finished."""

from mooncake_core.ledger.contract import (
    InstanceLoad,
    Ledger,
    Limits,
    RefusalReason,
    Reservation,
    SeatLimits,
)
from mooncake_core.ledger.memory import MemoryLedger
from mooncake_core.ledger.reading import ledger_prefix, promised
from mooncake_core.ledger.redis import RedisLedger
from mooncake_core.ledger.share import Waiting

__all__ = [
    "InstanceLoad",
    "Ledger",
    "Limits",
    "MemoryLedger",
    "RedisLedger",
    "RefusalReason",
    "Reservation",
    "SeatLimits",
    "Waiting",
    "ledger_prefix",
    "promised",
]
