"""`mooncakectl up` with instances of two Pods: they serve, and are recreated as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from mooncake_testing.cluster import Cluster, cluster
from mooncake_testing.waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "examples" / "multi-pod.yaml"
LEADER, WORKER = "prefill-p-0", "prefill-p-0-w1"


@pytest.fixture(scope="module")
def groups() -> Iterator[Cluster]:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    (decode,) = manifest["spec"]["decodePools"]
    decode |= {"instance": {"size": 2, "parallelism": {"tensor": 2}}, "drain": {"timeoutSeconds": 20}}
    with cluster(yaml.safe_dump(manifest)) as running:
        yield running


def completion(groups: Cluster) -> httpx.Response:
    body = {"model": groups.model, "prompt": list(range(1, 2000)), "max_tokens": 6, "ignore_eos": True}
    return httpx.post(f"{groups.endpoint}/v1/completions", json=body, timeout=30, trust_env=False)


def test_prefill_and_decode_of_two_pods_serve_as_two_instances(groups: Cluster) -> None:
    answer = completion(groups)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 6
    instances = {each["id"] for each in groups.instances(groups.admin_urls[0])}
    assert instances == {f"{groups.name}-prefill-p-0", f"{groups.name}-decode-d-0"}
    engines = {pod for pod, container in groups.processes() if container == "engine"}
    assert engines == instances | {f"{instance}-w1" for instance in instances}


@pytest.mark.parametrize("killed", [WORKER, LEADER])
def test_after_kill_9_of_one_pods_engine_its_whole_instance_is_new_and_serves(
    groups: Cluster, killed: str
) -> None:
    before = groups.processes()
    groups.kill(f"{groups.name}-{killed}", "engine")

    def is_new() -> bool:
        now = groups.processes()
        places = [place for place in before if place[0].removeprefix(f"{groups.name}-") in (LEADER, WORKER)]
        assert len(places) == 3, "leader, its sidecar, worker"
        return all(now.get(place, before[place]) != before[place] for place in places)

    eventually(is_new, "leader, sidecar and worker are others", 60.0, told=groups.said)
    untouched = (f"{groups.name}-decode-d-0", "engine")
    assert groups.processes()[untouched] == before[untouched]

    def serves() -> bool:
        return completion(groups).status_code == 200

    eventually(serves, "the new instance serves", 60.0, told=groups.said)
