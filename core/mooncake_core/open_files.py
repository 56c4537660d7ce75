"""How many connections a process may have open at once."""

from __future__ import annotations

import contextlib
import resource

MOST = 65_536
"""More than any of our processes needs, and few enough for those who walk through all of them."""


def allow_many_open_files() -> None:
    """Raise this process's limit on open files as far as it may be raised.

    A login shell gives 1 024, for programs that use `select`. A server that has reached it accepts nobody any
    more, and cannot connect to its engines either, which then look as if they had failed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
