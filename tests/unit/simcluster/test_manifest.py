"""What of a manifest the simulation goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_core.api.cluster import MooncakeCluster
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.manifest import spec_of
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.engine.options import parse
from mooncake_simulator.workloads import Request

EXAMPLES = Path(__file__).parents[3] / "examples"


def simulated(name: str, **changes: Any) -> ClusterSpec:
    manifest = yaml.safe_load((EXAMPLES / name).read_text())
    for path, value in changes.items():
        *folders, last = path.split("__")
        where = manifest["spec"]
        for folder in folders:
            where = where[int(folder) if folder.isdigit() else folder]
        where[last] = value
    return spec_of(MooncakeCluster.model_validate(manifest))


def test_an_engine_that_is_told_how_much_kv_to_hold_holds_no_more() -> None:
    spec = simulated("tiers.yaml")
    # One of the 800 blocks is the engine's null block.
    assert {each.kv_capacity_tokens for each in (*spec.prefill_kinds, *spec.decode_kinds)} == {799 * 512}
    assert spec.cache_tokens == 799 * 512
    assert simulated("quickstart.yaml").cache_tokens == LLAMA3_70B_A800.kv_capacity_tokens


def test_what_an_instance_of_several_pods_is_told_to_hold_is_the_instances() -> None:
    told = simulated("multi-pod.yaml", engine__args=["--num-gpu-blocks-override=101"])
    assert {each.kv_capacity_tokens for each in told.prefill_kinds} == {100 * 512}
    untold = simulated("multi-pod.yaml")
    assert {each.kv_capacity_tokens for each in untold.prefill_kinds} == {
        2 * LLAMA3_70B_A800.kv_capacity_tokens
    }


def test_an_engine_that_is_told_how_many_requests_to_decode_at_once_decodes_no_more() -> None:
    told = simulated("quickstart.yaml", engine__args=["--max-num-seqs=1"], decodePools__0__replicas=1)
    together = [
        Request(timestamp_ms=0.0, input_length=512, output_length=101, hash_ids=(at,)) for at in range(4)
    ]
    free = simulated("quickstart.yaml", decodePools__0__replicas=1)
    one_s, all_s = (
        max(each.ended_s or 0.0 for each in simulate(spec, together).outcomes) for spec in (told, free)
    )
    # A hundred steps for each one alone, or for all four at once.
    assert one_s > 4 * 100 * LLAMA3_70B_A800.decode_t0_s > 2 * all_s


def test_a_simulated_engine_decodes_as_many_at_once_in_a_simulation_as_it_does_live() -> None:
    together = [
        Request(timestamp_ms=0.0, input_length=16, output_length=101, hash_ids=(at,)) for at in range(300)
    ]
    alone = simulated("quickstart.yaml", decodePools__0__replicas=1)
    ends_s = sorted(each.ended_s or 0.0 for each in simulate(alone, together).outcomes)
    at_once = parse(["--model", "tiny"], {}).max_num_seqs
    # Those that find no place begin when the first of the others have ended.
    assert ends_s[at_once] > ends_s[at_once - 1] + 50 * LLAMA3_70B_A800.decode_t0_s
    assert simulated("quickstart.yaml", engine={"type": "vLLM", "image": "i"}).max_batch == 0


@pytest.mark.parametrize(
    ("promotion", "redis", "rule"),
    [("Predicted", {"managed": {}}, "steered"), ("None", {"managed": {}}, "lru"), ("Predicted", None, "lru")],
)
def test_a_store_is_simulated_as_it_will_be_driven(promotion: str, redis: Any, rule: str) -> None:
    ssd = {"size": "8Ti", "path": "/data/kv", "promotion": promotion}
    scheduler = {"replicas": 2, "redis": redis} if redis else {"replicas": 1}
    spec = simulated("tiers.yaml", kvCachePools__0__ssd=ssd, scheduler=scheduler)
    assert spec.tiers is not None
    assert spec.tiers.rule == rule
    assert simulated("quickstart.yaml").tiers is None
