from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mooncake_testing.pods import pod
from mooncakectl.local import Folders, LocalRuntimeError, PodUnsupportedError, World
from mooncakectl.local.containers import ContainerKind, PodSpec, RestartPolicy
from mooncakectl.local.ports import (
    BLOCK_PORTS,
    PortBlocks,
    first_free_port,
    held_port,
    loopback_port_is_free,
)
from mooncakectl.local.programs import Programs, find_redis_server
from mooncakectl.local.runtime import resolve_pods

FOLDERS = Folders("c", Path("/state"), Path("/run/r"))


def resolve(manifest: dict[str, Any], *others: dict[str, Any]) -> PodSpec:
    return resolve_pods(World.of([manifest, *others]), FOLDERS, Programs(Path("/usr/bin/redis-server")))[0]


def container(**fields: Any) -> dict[str, Any]:
    return {"name": "main", "command": ["python", "-m", "x"], **fields}


def test_env_is_expanded_in_order_and_mount_paths_become_folders() -> None:
    env = [
        {"name": "MOONCAKE_RUN_DIR", "value": "/var/run/mooncake"},
        {"name": "EVENTS", "value": "ipc://$(MOONCAKE_RUN_DIR)/events.sock"},
        {"name": "LATER", "value": "$(AFTER)"},
        {"name": "AFTER", "value": "x"},
        {"name": "COST", "value": "$$(AFTER)"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    spec = resolve(
        pod(
            "p-0",
            container(
                args=["--name", "$(POD)", '--events={"endpoint": "$(EVENTS)"}', "--dir=/var/run/mooncake"],
                env=env,
                volumeMounts=[{"name": "run", "mountPath": "/var/run/mooncake"}],
            ),
            volumes=[{"name": "run", "emptyDir": {"medium": "Memory"}}],
        )
    )
    main = spec.containers[0]
    folder = "/run/r/p-0/run"
    assert main.argv == (
        *(sys.executable, "-m", "x", "--name", "p-0"),
        *(f'--events={{"endpoint": "ipc://{folder}/events.sock"}}', f"--dir={folder}"),
    )
    assert main.env["EVENTS"] == f"ipc://{folder}/events.sock"
    assert main.env["LATER"] == "$(AFTER)"
    assert main.env["COST"] == "$(AFTER)"
    assert (main.env["POD"], main.env["APP"], main.env["VLLM_HOST_IP"]) == ("p-0", "p-0", "127.0.0.1")


def test_env_comes_from_secrets_and_config_maps() -> None:
    others = [
        {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"token": "t"}},
        {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"level": "debug"}},
    ]
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k", "optional": True}}},
    ]
    sources = [{"prefix": "LOG_", "configMapRef": {"name": "m"}}]
    main = resolve(pod("p", container(env=env, envFrom=sources)), *others).containers[0]
    assert dict(main.env) == {"LOG_level": "debug", "TOKEN": "t"}


@pytest.mark.parametrize(
    ("fields", "spec", "message"),
    [
        ({"command": []}, {}, r"Pod p: container main: no command"),
        ({"command": [], "args": ["x"]}, {}, r"args without command"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}, {}, r"volumeMounts\[v\]: the Pod has no such"),
        ({"lifecycle": {"postStart": {}}}, {}, r"lifecycle.postStart"),
        (
            {"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]},
            {},
            r"env A: resourceFieldRef is known only to a node",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]},
            {},
            r"env A: fieldPath 'status.phase': one of metadata.name",
        ),
        (
            {},
            {"volumes": [{"name": "v", "secret": {"secretName": "keys"}}]},
            r"no Secret 'keys'.*--secrets DIR",
        ),
        ({}, {"volumes": [{"name": "v", "nfs": {}}]}, r"spec.volumes\[v\]: nfs needs a cluster"),
    ],
)
def test_what_cannot_run_here_is_named_with_its_place(
    fields: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(PodUnsupportedError, match=message):
        resolve(pod("p", container(**fields), **spec))


def test_kinds_of_containers_and_their_restart_policies() -> None:
    spec = resolve(
        pod(
            "p",
            container(),
            initContainers=[
                container(name="once"),
                container(name="beside", restartPolicy="Always"),
            ],
        )
    )
    kinds = {c.name: (c.kind, c.restart) for c in spec.containers}
    assert kinds == {
        "once": (ContainerKind.INIT, RestartPolicy.ON_FAILURE),
        "beside": (ContainerKind.SIDECAR, RestartPolicy.ALWAYS),
        "main": (ContainerKind.MAIN, RestartPolicy.ALWAYS),
    }


def test_a_redis_container_needs_no_command_and_gets_a_real_server() -> None:
    redis = {"name": "redis", "image": "redis:7", "args": ["--port", "7000"]}
    assert resolve(pod("redis-0", redis)).containers[0].argv == ("/usr/bin/redis-server", "--port", "7000")
    assert find_redis_server().exists()


def test_a_redis_server_that_is_too_old_gives_way_to_a_valkey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (
        ("redis-server", "Redis server v=5.0.14"),
        ("valkey-server", "Valkey server v=8.1.1"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{version} sha=00000000:0'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert find_redis_server() == tmp_path / "valkey-server"


def test_secrets_can_be_given_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "keys.json").write_text("{}")
    redis = tmp_path / "redis.yaml"
    redis.write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: redis}\nstringData: {url: r}\n")
    world = World.of([{"kind": "Secret", "metadata": {"name": "redis"}, "data": {}}], secrets_dir=tmp_path)
    assert world.secrets == {"keys": {"keys.json": b"{}"}, "redis": {"url": b"r"}}
    with pytest.raises(LocalRuntimeError, match=r"data.k is not base64; stringData"):
        World.of([{"kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "no base64!"}}])
    # What lies beside the Secrets is none of its business.
    (tmp_path / "nothing.yaml").write_text("# written later\n")
    (tmp_path / "others.yaml").write_text(
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: serving}\n"
        "---\napiVersion: v1\nkind: List\nitems: []\n"
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\nunheard: of\n---\njust words\n"
        "---\napiVersion: v1\nkind: Secret\nmetadata: {name: beside, namespace: }\nstringData: {k: v}\n"
    )
    assert World.of([], secrets_dir=tmp_path).secrets == {
        "keys": {"keys.json": b"{}"},
        "redis": {"url": b"r"},
        "beside": {"k": b"v"},
    }
    for wrong in (
        b"\xff\xfe",
        b"apiVersion: v1\nkind: Secret\n",
        b"kind: Secret\nmetadata: {name: a}\n",
        b"[",
    ):
        redis.write_bytes(wrong)
        with pytest.raises(LocalRuntimeError, match=r"--secrets .*redis\.yaml"):
            World.of([], secrets_dir=tmp_path)
    with pytest.raises(LocalRuntimeError, match=r"--secrets .*No such file"):
        World.of([], secrets_dir=tmp_path / "absent")


# Others may run these tests at the same time.
KIMI = f"kimi-{os.getpid()}"


def test_pods_keep_their_ports_and_never_share_them() -> None:
    names = [f"kimi-prefill-p-{n}" for n in range(40)]
    with PortBlocks(KIMI, is_free=lambda port: True) as blocks:
        bases = [blocks.base(name) for name in names]
        assert bases == [blocks.base(name) for name in names]
        assert len(set(bases)) == len(bases)
        assert all(base % BLOCK_PORTS == 0 and 20_000 <= base < 32_768 for base in bases)
        with PortBlocks(KIMI, is_free=lambda port: True) as others:
            assert not set(bases) & {others.base(name) for name in names}
    with PortBlocks(KIMI, is_free=lambda port: True) as again:
        assert bases == [again.base(name) for name in names]


HOLD = """
import sys
from mooncakectl.local.ports import PortBlocks
with PortBlocks(sys.argv[1]) as blocks:
    print(*[blocks.base(f"kimi-decode-d-{n}") for n in range(40)], flush=True)
    sys.stdin.read()
"""


def test_two_that_start_at_once_share_no_block_and_one_killed_gets_the_same_again() -> None:
    command = [sys.executable, "-c", HOLD, KIMI]

    def bases(process: subprocess.Popen[str]) -> list[int]:
        assert process.stdout is not None
        return [int(base) for base in process.stdout.readline().split()]

    with ExitStack() as started:

        def start() -> subprocess.Popen[str]:
            pipes = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.callback(pipes.kill)
            return started.enter_context(pipes)

        first, second = start(), start()
        firsts, seconds = bases(first), bases(second)
        assert len({*firsts, *seconds}) == 80
        first.kill()
        first.wait()
        assert bases(start()) == firsts


def test_a_block_with_a_taken_port_is_passed_over() -> None:
    with PortBlocks(KIMI, is_free=lambda port: True) as blocks:
        usual = blocks.base("a")
    with PortBlocks(KIMI, is_free=lambda port: port != usual + 7) as blocks:
        assert blocks.base("a") != usual
    with (
        PortBlocks(KIMI, is_free=lambda port: port % 10 != 3) as blocks,
        pytest.raises(LocalRuntimeError, match="no 10 free ports in a row between 20000 and 31999"),
    ):
        blocks.base("a")


def test_a_serving_port_within_the_range_of_blocks_and_a_block_exclude_each_other() -> None:
    with PortBlocks(KIMI) as blocks:
        base = blocks.base("a")
        with pytest.raises(LocalRuntimeError, match="is taken"), held_port(base + 5, tries=1):
            pass
    with held_port(base + 5, tries=1), held_port(base + 6, tries=1), PortBlocks(KIMI) as blocks:
        assert blocks.base("a") != base


def test_the_serving_port_is_the_wanted_one_or_the_next_free() -> None:
    assert first_free_port(8000, is_free=lambda port: True) == 8000
    assert first_free_port(8000, is_free=lambda port: port > 8002) == 8003
    with pytest.raises(LocalRuntimeError, match="--port"):
        first_free_port(8000, is_free=lambda port: False)


def test_sockets_in_a_pods_folder_stay_under_the_limit_of_the_kernel() -> None:
    environ = {"XDG_STATE_HOME": "/home/someone/with/a/long/name/.local/state"}
    folders = Folders.of("a-cluster-with-a-name-of-forty-characters", environ)
    socket = (
        folders.pod("a-cluster-with-a-name-of-forty-characters-prefill-p-12") / "events" / "kv-events.sock"
    )
    assert len(str(socket)) < 100
    other = Folders.of("another", environ)
    assert folders.run != other.run
    assert folders.log("p", "c").is_relative_to(folders.state)


def test_a_port_is_kept_for_those_who_share_it_from_the_moment_it_was_found() -> None:
    with held_port(20_000, tries=12_000) as port:
        assert not loopback_port_is_free(port)
        with held_port(port, tries=100) as another:
            assert another > port, "two that start at once do not get the same one"
        with pytest.raises(LocalRuntimeError, match=f"port {port} is taken"), held_port(port, tries=1):
            pass
        servers = [socket.socket(), socket.socket()]
        for server in servers:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("127.0.0.1", port))
            server.listen(100)
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        for server in servers:
            server.close()
    assert loopback_port_is_free(port)
