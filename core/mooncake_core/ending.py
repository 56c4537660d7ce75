"""How a process ends that has given back all it had."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable
from typing import NoReturn


async def then_exit(work: Awaitable[int]) -> NoReturn:
    """Do the work of a process and end the process with the status that it returns.

    Without closing the loop: uvloop's waits for every look-up of a name that is still under way in a thread,
    given up or not. Where the name server is silent, as when a whole cluster is deleted, that is a minute in
    which a Pod does not end.

    Args:
        work: all of it, clean-up included; what it raises is passed on.
    """
    status = await work
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
