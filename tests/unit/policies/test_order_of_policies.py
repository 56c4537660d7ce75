"""The order that the paper reports (FAST'25 Fig. 5), on a small cluster: a check of sanity, no simulator."""

import random
from collections import OrderedDict
from statistics import fmean

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, World
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import decode, instance

BLOCK = 512
CAPACITY_BLOCKS = 2_000
NODES = 6
COSTS = CostModels(default=CostModel.from_profile(LLAMA3_70B_A800))


def conversations(seed, *, rate, count):
    """Sessions of several turns behind a few system prompts of unequal fame: (time, blocks) by time."""
    chance = random.Random(seed)
    fame = [1 / (rank + 1) for rank in range(20)]
    arrivals, now, fresh = [], 0.0, iter(range(10**9))
    while len(arrivals) < count:
        now += chance.expovariate(rate / 4)
        system = chance.choices(range(20), fame)[0]
        blocks = [("system", system, i) for i in range(2 + system % 7)]
        at = now
        for _ in range(chance.randint(1, 7)):
            blocks = blocks + [next(fresh) for _ in range(1 + int(chance.paretovariate(1.2)) % 60)]
            arrivals.append((at, blocks))
            at += chance.expovariate(1 / 20)
    return sorted(arrivals, key=lambda arrival: arrival[0])[:count]


class Node:
    """One prefill instance: one job at a time, and the blocks it holds, least recently used first."""

    def __init__(self, name):
        self.instance = instance(name, Role.PREFILL, fetch="peer")
        self.free_s = 0.0
        self.held = OrderedDict()

    def prefix(self, blocks):
        depth = 0
        for block in blocks:
            if block not in self.held:
                break
            depth += 1
        return depth

    def keep(self, blocks):
        for block in blocks:
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > CAPACITY_BLOCKS:
            self.held.popitem(last=False)


def mean_ttft_s(policy, arrivals, seed):
    nodes = {f"p{i}": Node(f"p{i}") for i in range(NODES)}
    conductor = Conductor(create(policy), Admission(AdmissionMode.NONE), COSTS, random.Random(seed))
    decodes = [decode("d0")]
    times = []
    for now_s, blocks in arrivals:
        depths = {name: node.prefix(blocks) for name, node in nodes.items()}
        best = max(depths.values())
        views = [
            InstanceView(
                node.instance,
                InstanceLoad(queued_s=max(0.0, node.free_s - now_s), queued=int(node.free_s > now_s)),
                hbm_tokens=depths[name] * BLOCK,
                fetchable_tokens=best * BLOCK,
            )
            for name, node in nodes.items()
        ]
        ask = Ask("q", len(blocks) * BLOCK, 100)
        placement = conductor.decide(ask, World(now_s, views, decodes, COSTS))
        node = nodes[placement.prefill.id]
        node.free_s = max(node.free_s, now_s) + placement.transfer_s + placement.prefill_s
        node.keep(blocks)
        times.append(node.free_s - now_s)
    return fmean(times)


def means(policies, *, rate):
    seeds = range(2)
    runs = {seed: conversations(seed, rate=rate, count=800) for seed in seeds}
    return {policy: fmean(mean_ttft_s(policy, runs[seed], seed) for seed in seeds) for policy in policies}


def test_under_load_random_is_worst_then_load_balance_then_cache_aware_then_algorithm_1():
    found = means(["random", "load-balance", "cache-aware", "algorithm-1", "kv-centric"], rate=6.0)
    assert found["random"] > found["load-balance"] > found["cache-aware"] >= found["algorithm-1"]
    assert found["kv-centric"] <= 1.03 * found["algorithm-1"]


def test_at_low_load_kv_centric_is_as_good_as_algorithm_1():
    found = means(["algorithm-1", "kv-centric"], rate=0.8)
    assert found["kv-centric"] == pytest.approx(found["algorithm-1"], rel=0.01)
