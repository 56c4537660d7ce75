"""What a simulation is put through beside its load: rules for tiers, instances that die, late reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import msgspec

from mooncake_core.api.scalars import duration_s
from mooncake_core.profiles import PROFILES
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.contents import Rule
from mooncake_simulator.cluster.failures import Failure


def parts(text: str) -> list[str]:
    """What an option lists with commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def rules(text: str) -> list[Rule]:
    """What `--tiers` names.

    Raises:
        ValueError: there is no such rule.
    """
    chosen = parts(text)
    for each in chosen:
        if each not in get_args(Rule):
            known = ", ".join(get_args(Rule))
            raise ValueError(f"--tiers {each}: write one of {known}, or several with commas")
    return [msgspec.convert(each, Rule) for each in chosen]


def profiles(text: str) -> list[str]:
    """What `--profile` names.

    Raises:
        ValueError: there is no such profile.
    """
    chosen = parts(text)
    for each in chosen:
        if each not in PROFILES:
            raise ValueError(f"--profile {each}: write one of {', '.join(PROFILES)}")
    return chosen


def one_profile(text: str) -> str | None:
    """The same, where one is meant: a plan is for one kind of hardware.

    Raises:
        ValueError: there is no such profile, or several are named.
    """
    chosen = profiles(text)
    if len(chosen) > 1:
        raise ValueError(f"--profile {text}: a plan is for one of them: run it once for each")
    return chosen[0] if chosen else None


def failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """What each `--die` says: `d-0@120s`, or `d-0@120s..180s` for one that comes back.

    Raises:
        ValueError: it cannot be read.
    """
    return tuple([_failure(text) for text in texts])


def _failure(text: str) -> Failure:
    instance, at, when = text.partition("@")
    dies, dots, back = when.partition("..")
    try:
        if not (instance and at and dies) or (dots and not back):
            raise ValueError("a name and a moment are wanted")
        at_s = duration_s(dies)
        return Failure(instance, at_s, duration_s(back)) if dots else Failure(instance, at_s)
    except ValueError as error:
        raise ValueError(f"--die {text}: {error}; write e.g. d-0@120s, or d-0@120s..180s") from None


def under(
    spec: ClusterSpec,
    tiers: Sequence[Rule] = (),
    die: Sequence[Failure] = (),
    load_age_s: float = 0.0,
    *,
    copies: bool = False,
) -> list[ClusterSpec]:
    """The cluster under these conditions, once for each rule; `copies`: of hot blocks, in the store.

    Raises:
        ValueError: it has no tiers, or no such instance.
    """
    spec = replace(spec, failures=tuple(die), load_age_s=load_age_s)
    if not tiers and not copies:
        return [spec]
    if spec.tiers is None:
        asked = "--tiers" if tiers else "--copy-hot-blocks"
        raise ValueError(f"{asked}: the manifest has no store with an SSD: write kvCachePools[].ssd")
    spec = replace(spec, tiers=replace(spec.tiers, replicate=copies))
    if not tiers:
        return [spec]
    assert spec.tiers is not None
    return [replace(spec, tiers=replace(spec.tiers, rule=rule)) for rule in tiers]
