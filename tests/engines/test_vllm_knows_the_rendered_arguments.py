"""What leader and workers of an instance are started with, read by vLLM's own parser."""

from __future__ import annotations

import json
import subprocess

import pytest

from mooncake_core.api import parse_object
from mooncake_operator.planning import ClusterNames, Credentials, render
from mooncake_testing.vllm_environment import ensure_environment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# `vllm serve …` and the API server's module read the same arguments, the model aside.
READER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = []
for line in sys.stdin:
    parser = make_arg_parser(FlexibleArgumentParser())
    read = parser.parse_args(json.loads(line))
    found.append({name: getattr(read, name) for name in (
        "model", "model_tag", "headless", "nnodes", "node_rank", "master_addr", "master_port",
        "tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "block_size")})
print("\\n" + json.dumps(found))
"""


def rendered() -> dict[str, list[str]]:
    """Arguments of a prefill instance's Pods."""
    document = {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "q"},
        "spec": {
            "model": {"name": "kimi-k2", "path": "/models/kimi-k2"},
            "engine": {"type": "vLLM", "image": "vllm/vllm-openai:v0.33.0", "blockSize": 32},
            "prefillPools": [
                {
                    "name": "prefill",
                    "instance": {"size": 2, "parallelism": {"tensor": 8, "pipeline": 2}},
                    "resources": {"gpu": {"count": 8}},
                }
            ],
            "decodePools": [{"name": "decode"}],
            "kvCachePools": [{"name": "kv", "segmentSize": "1Gi"}],
            "scheduler": {"redis": {"managed": {}}},
        },
    }
    world = render(parse_object(document), ClusterNames(), credentials=Credentials(redis_password="abc"))
    return {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["args"]
        for pod in world.pods
        if pod["metadata"]["labels"].get("mooncake.io/role") in ("prefill", "decode")
    }


def test_vllm_reads_what_ties_leader_and_worker_together() -> None:
    arguments = rendered()
    lines = "".join(json.dumps(each) + "\n" for each in arguments.values())
    environment = ensure_environment()
    program = subprocess.run(
        [str(environment.python), "-c", READER],
        input=lines,
        env=environment.variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    found = dict(zip(arguments, json.loads(program.stdout.splitlines()[-1]), strict=True))
    leader, worker = found["q-prefill-p-0"], found["q-prefill-p-0-w1"]
    alike = {"nnodes": 2, "master_addr": "q-prefill-p-0.q-prefill.default.svc", "master_port": 21006}
    alike |= {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "block_size": 32}
    alike |= {"distributed_executor_backend": "mp"}
    assert leader.items() >= {**alike, "node_rank": 0, "headless": False, "model": "/models/kimi-k2"}.items()
    assert (
        worker.items() >= {**alike, "node_rank": 1, "headless": True, "model_tag": "/models/kimi-k2"}.items()
    )
    assert (found["q-decode-d-0"]["nnodes"], found["q-decode-d-0"]["headless"]) == (1, False)
