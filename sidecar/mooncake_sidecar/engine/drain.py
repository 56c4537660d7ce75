"""Emptying an engine before it ends: no new work, and what runs may finish."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

import structlog

from mooncake_core.ledger import ledger_prefix, promised
from mooncake_sidecar.engine.connections import callers
from mooncake_sidecar.engine.engine_probe import Health
from mooncake_sidecar.engine.sidecar import Sidecar

_log = structlog.get_logger(__name__)

LOOK_EVERY_S = 0.25
SETTLE_S = 1.0
"""Schedulers learn of the mark when they next read the registry: until then work may still arrive."""
UNMARKED_SETTLE_S = 5.0
"""Without a registry they learn of it when they next ask sidecars, and must have noticed that it is away."""


class Drained(StrEnum):
    """How a drain ended."""

    IDLE = "idle"
    GONE = "gone"
    """The engine ended by itself."""
    TIMEOUT = "timeout"
    """Work was left when the time was over."""


async def drain(sidecar: Sidecar, timeout_s: float) -> Drained:
    """Mark the instance draining and wait until nothing runs, waits or is promised to it.

    Args:
        sidecar: beside the engine.
        timeout_s: wall seconds to wait at most.
    """
    began_s = time.monotonic()
    marked = await sidecar.start_drain()
    # Who reads the mark does so from now on; without one the sidecar itself has said so from the start.
    settled_s = time.monotonic() + SETTLE_S if marked else began_s + UNMARKED_SETTLE_S
    _log.info("draining", timeout_s=timeout_s)
    quiet = 0
    while True:
        outcome = await _look(sidecar)
        quiet = quiet + 1 if outcome is Drained.IDLE else 0
        waited_s = time.monotonic() - began_s
        # Between the ledger and the engine a request is in neither for a moment: look twice.
        if outcome is Drained.GONE or (quiet > 1 and time.monotonic() >= settled_s):
            break
        if waited_s >= timeout_s:
            outcome = Drained.TIMEOUT
            break
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, timeout_s - waited_s)))
    if outcome is Drained.GONE:
        sidecar.saw_engine_gone()
    _log.info("drained", outcome=outcome, after_s=round(time.monotonic() - began_s, 2))
    assert outcome is not None
    return outcome


async def _look(sidecar: Sidecar) -> Drained | None:
    try:
        load = await sidecar.probe.load()
    except ConnectionError:
        return Drained.GONE if await sidecar.probe.health() is Health.DEAD else None
    if load.running or load.waiting:
        return None
    # An engine without metrics is as idle as the ledger says.
    config = sidecar.config
    try:
        prefills, decodes = await promised(
            sidecar.client, prefix=ledger_prefix(config.namespace), instance=config.instance
        )
    except ConnectionError:
        # Without Redis only the engine can be asked, and one without metrics can only be looked at.
        return Drained.IDLE if load.is_told or callers(config.engine_url) == 0 else None
    return None if prefills or decodes else Drained.IDLE
