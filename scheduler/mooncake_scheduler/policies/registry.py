"""Policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_scheduler.conductor.model import Policy
from mooncake_scheduler.policies.algorithm_1 import Algorithm1
from mooncake_scheduler.policies.cache_aware import CacheAware
from mooncake_scheduler.policies.dynamo import Dynamo
from mooncake_scheduler.policies.kv_centric import KvCentric
from mooncake_scheduler.policies.llm_d_weighted import LlmDWeighted
from mooncake_scheduler.policies.load_balance import LoadBalance
from mooncake_scheduler.policies.random import Random
from mooncake_scheduler.policies.round_robin import RoundRobin
from mooncake_scheduler.policies.sglang_cache_aware import SglangCacheAware
from mooncake_scheduler.policies.vllm_kv_aware import VllmKvAware

_POLICIES: dict[str, Callable[..., Policy]] = {
    policy.name: policy
    for policy in (
        KvCentric,
        Algorithm1,
        CacheAware,
        LoadBalance,
        Random,
        RoundRobin,
        Dynamo,
        VllmKvAware,
        SglangCacheAware,
        LlmDWeighted,
    )
}


class UnknownPolicyError(ValueError):
    """No policy of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown policy {name!r}: write one of {', '.join(_POLICIES)}")


def names() -> Sequence[str]:
    """The names that `create` knows, the default first."""
    return tuple(_POLICIES)


def create(name: str, **settings: Any) -> Policy:
    """A new policy of this name.

    One set of settings serves all policies (`RoutingConfig`): each takes those that it has, so that policies
    can be compared by changing the name alone.

    Raises:
        UnknownPolicyError: there is no such policy; the message lists the names.
        TypeError: a setting that no policy has.
    """
    if name not in _POLICIES:
        raise UnknownPolicyError(name)
    taken = {each: set(inspect.signature(policy).parameters) for each, policy in _POLICIES.items()}
    unknown = set(settings).difference(*taken.values())
    if unknown:
        raise TypeError(f"no policy has the setting {', '.join(sorted(unknown))}")
    return _POLICIES[name](**{key: value for key, value in settings.items() if key in taken[name]})
