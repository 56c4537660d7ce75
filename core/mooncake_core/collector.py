"""Python's garbage collector in a process that serves for long."""

from __future__ import annotations

import gc


def freeze_what_lives() -> None:
    """Let the collector pass over all that was made so far, and look less often at what is made from now on.

    To be called once everything is set up: what lives as long as the process need not be looked at again and
    again, and each request or event is thousands of small objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
