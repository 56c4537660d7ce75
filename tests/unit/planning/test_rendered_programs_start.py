"""The rendered command lines are understood by the programs they start."""

import contextlib
import subprocess
import time

import pytest
import redis

from mooncake_core.api import load_manifests
from mooncake_operator.planning import Credentials, LocalNames, pod_names, render
from mooncake_simulator.engine.options import parse
from mooncake_testing.ports import free_port
from mooncake_testing.redis import redis_executable

MANIFEST = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: q}
spec:
  model: {name: llama3-70b}
  engine: {type: Simulated, blockSize: 512, connector: %s, simulated: {timeScale: 10}}
  prefillPools: [{name: prefill}]
  decodePools: [{name: decode}]
  kvCachePools: [{name: kv, segmentSize: 1Gi}]
  scheduler: {redis: {managed: {}}}
"""


def world_of(connector="MooncakeConnector", redis_port=None):
    (cluster,) = load_manifests(MANIFEST % connector)
    bases = {pod: 20_000 + 10 * number for number, pod in enumerate(pod_names(cluster))}
    if redis_port is not None:
        bases["q-redis-0"] = redis_port
    return render(cluster, LocalNames(bases), credentials=Credentials(redis_password="s3cret"))


@pytest.mark.parametrize("connector", ["MooncakeConnector", "NixlConnector"])
def test_the_simulated_engine_knows_every_flag_it_is_given(connector):
    for pod in world_of(connector).pods:
        for container in pod["spec"]["containers"]:
            if container["name"] != "engine":
                continue
            environment = {item["name"]: item.get("value", "127.0.0.1") for item in container["env"]}
            options = parse(container["args"], environment)
            assert options.unknown_flags == ()
            assert options.events.enabled
            assert [one.name for one in options.connectors] == [connector, "MooncakeStoreConnector"]
            base = options.port
            assert (options.bootstrap_port, options.nixl_port) == (base + 1, base + 2)
            assert options.block_size == 512
            assert options.time_scale == 10


def test_a_real_redis_runs_with_the_rendered_configuration_and_asks_for_the_password(tmp_path):
    port = free_port()
    world = world_of(redis_port=port)
    (secret,) = world.secrets
    for key, text in secret["stringData"].items():
        (tmp_path / key).write_text(text)
    (pod,) = [pod for pod in world.pods if pod["metadata"]["name"] == "q-redis-0"]
    (container,) = pod["spec"]["containers"]
    _, config = container["command"]
    words = [config.replace("$(MOONCAKE_REDIS_DIR)", str(tmp_path)), *container["args"]]
    server = subprocess.Popen([redis_executable(), *words], stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        with contextlib.closing(redis.Redis(port=port, password=secret["stringData"]["password"])) as client:
            wait_until_it_answers(client)
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("hash-max-ziplist-value")["hash-max-ziplist-value"] == "1024"
            assert client.config_get("save") == {"save": ""}
        with contextlib.closing(redis.Redis(port=port)) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
    finally:
        server.terminate()
        server.wait(timeout=10)


def wait_until_it_answers(client):
    for _ in range(100):
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("redis-server did not start")
