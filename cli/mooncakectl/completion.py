"""What a shell offers when Tab is pressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def of_list(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete the last word of a list with commas; words that it already has are not offered again.

    Args:
        names: what may stand in the list; asked only when somebody presses Tab.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in taken]

    return complete


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete one name.

    Args:
        names: what may be written; asked only when somebody presses Tab.
    """
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def policies() -> list[str]:
    """Names of placement policies."""
    from mooncake_scheduler.policies import names

    return [*names(), "all"]


def admission_modes() -> list[str]:
    """Names of admission modes."""
    from mooncake_core.config.scheduler import AdmissionMode

    return [mode.value for mode in AdmissionMode]


def tier_rules() -> list[str]:
    """What may keep the store's DRAM."""
    from typing import get_args

    from mooncake_simulator.cluster.contents import Rule

    return list(get_args(Rule))


def profiles() -> list[str]:
    """Names of hardware and model together."""
    from mooncake_core.profiles import PROFILES

    return list(PROFILES)
