"""The README's way: apply the example as it is, ask it something, delete it."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.installation import Operator
from e2e.kube import Kube, eventually
from e2e.under_test import ClusterUnderTest

_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "quickstart.yaml"
_MODEL = "llama3-70b"
_QUESTION: list[Any] = [{"role": "user", "content": "Where do the tokens come from?"}]
_OWNED = (
    *("MooncakeCluster", "MooncakePrefillPool", "MooncakeDecodePool", "MooncakeKVCachePool"),
    *("Pod", "Service", "Secret", "Deployment", "ReplicaSet", "ControllerRevision"),
    *("PodDisruptionBudget", "NetworkPolicy"),
)
_OF_THE_NAMESPACE = "kube-root-ca.crt"


@pytest.mark.timeout(1200, func_only=True)
async def test_the_quickstart_is_applied_answers_tells_its_story_and_goes_without_a_trace(
    cluster: ClusterUnderTest, kube: Kube, operator: Operator, namespace: str
) -> None:
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    await kube.patch("Namespace", namespace, {"metadata": {"labels": restricted}})

    await cluster.kubectl("apply", "-n", namespace, "-f", str(_EXAMPLE))
    await cluster.kubectl(
        *("wait", "-n", namespace, "mooncakecluster/quickstart", "--for=condition=Ready", "--timeout=240s")
    )
    async with cluster.forward(kube, "quickstart-scheduler", namespace, 80) as url:
        await _answers(url)
    async with cluster.port_forward("service/quickstart-scheduler", namespace, 80) as url:
        await _answers(url)
    await _tells_its_story(cluster, namespace)
    await _writes_nowhere_but_into_volumes(kube, namespace)

    await cluster.kubectl("delete", "-n", namespace, "-f", str(_EXAMPLE), "--wait", "--timeout=400s")
    await eventually("all of it is gone", lambda: _is_gone(kube, namespace))


async def _answers(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model=_MODEL, messages=_QUESTION, max_tokens=8)
        stream = await client.chat.completions.create(
            model=_MODEL,
            messages=_QUESTION,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    (choice,) = whole.choices
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert sum(map(bool, texts)) > 1, "a stream comes in pieces"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def _tells_its_story(cluster: ClusterUnderTest, namespace: str) -> None:
    story = await cluster.kubectl("get", "mooncake", "-n", namespace)
    print(story)
    rows = _rows(story)
    shown = rows["mooncakecluster.mooncake.io/quickstart"]
    assert (shown["PREFILL"], shown["DECODE"], shown["KV"]) == ("2/2", "2/2", "1/1")
    assert shown["READY"] == "True"
    for pool in ("prefillpool.mooncake.io/quickstart-prefill", "decodepool.mooncake.io/quickstart-decode"):
        shown = rows[f"mooncake{pool}"]
        assert {shown[column] for column in ("DESIRED", "READY", "ROUTABLE", "UPDATED")} == {"2"}
    assert rows["mooncakekvcachepool.mooncake.io/quickstart-kv"]["READY"] == "1"


def _rows(table: str) -> dict[str, dict[str, str]]:
    """What ``kubectl get`` printed of several kinds: each has a line of headings; columns are aligned."""
    rows: dict[str, dict[str, str]] = {}
    columns: list[tuple[str, int]] = []
    for line in filter(None, table.splitlines()):
        if line.startswith("NAME "):
            columns = [
                (word, line.index(f"{word} ") if word != "AGE" else line.rindex("AGE"))
                for word in line.split()
            ]
            continue
        ends = [start for _, start in columns[1:]] + [len(line)]
        cells = {name: line[start:end].strip() for (name, start), end in zip(columns, ends, strict=True)}
        rows[cells["NAME"]] = cells
    return rows


async def _writes_nowhere_but_into_volumes(kube: Kube, namespace: str) -> None:
    for pod in await kube.list_all("Pod", namespace):
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"], pod["metadata"]["name"]
        restarts = [status["restartCount"] for status in pod["status"]["containerStatuses"]]
        assert not any(restarts), f"{pod['metadata']['name']} was restarted"


async def _is_gone(kube: Kube, namespace: str) -> bool:
    listed = await asyncio.gather(*(kube.list_all(kind, namespace) for kind in (*_OWNED, "ConfigMap")))
    left = [f"{obj['kind']} {obj['metadata']['name']}" for objects in listed for obj in objects]
    assert left == [f"ConfigMap {_OF_THE_NAMESPACE}"], f"left: {left}"
    return True
