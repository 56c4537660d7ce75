from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_testing.pods import WEB_SERVER, pod, python, short_folders
from mooncake_testing.ports import free_port
from mooncake_testing.waiting import until
from mooncakectl.local import Folders, LocalRuntime, LocalRuntimeError, World
from mooncakectl.local.procfs import is_running, read_stat

SLEEP = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture
def folders() -> Iterator[Folders]:
    with short_folders() as folders:
        yield folders


@pytest.fixture
def port() -> int:
    return free_port()


def member(name: str, instance: str, *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """One Pod of an instance."""
    made = pod(name, *containers, **spec)
    made["metadata"]["labels"]["mooncake.io/instance"] = instance
    return made


def web(port: int, **fields: Any) -> dict[str, Any]:
    return python("web", WEB_SERVER, **fields) | {
        "env": [{"name": "PORT", "value": str(port)}, *fields.get("env", [])]
    }


def pids(runtime: LocalRuntime) -> dict[str, int | None]:
    return {f"{s.name}/{c.name}": c.pid for s in runtime.statuses() for c in s.containers}


def gone(pid: int) -> bool:
    found = read_stat(pid)
    return found is None or found.is_zombie


async def test_a_pod_becomes_ready_through_its_probes_and_ends_on_sigterm(
    folders: Folders, port: int
) -> None:
    probes = {
        "startupProbe": {"tcpSocket": {"port": port}, "periodSeconds": 0.1, "failureThreshold": 100},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": port}, "periodSeconds": 0.1},
        "livenessProbe": {"exec": {"command": ["python", "-S", "-c", "pass"]}, "timeoutSeconds": 5},
    }
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("web-0", web(port, **probes)),)))
        await runtime.wait_ready(20)
        await runtime.stop()
    assert "told to end" in folders.log("web-0", "web").read_text()
    assert not folders.run.exists()


async def test_config_maps_secrets_and_empty_dirs_are_folders_that_paths_lead_to(folders: Folders) -> None:
    code = (
        "import os, sys, stat, time\n"
        "config = open(sys.argv[1] + '/scheduler.json').read()\n"
        "key = os.path.join(os.environ['KEYS_DIR'], 'key')\n"
        "mode = stat.S_IMODE(os.stat(key).st_mode)\n"
        "open(os.environ['SHARED_DIR'] + '/out', 'w').write(config + open(key).read() + oct(mode))\n"
        "print(os.environ['WHO'], os.environ['IP'], sys.argv[1].count('$'), flush=True)\n"
        "time.sleep(600)\n"
    )
    mounts = [
        {"name": "config", "mountPath": "/etc/mooncake"},
        {"name": "keys", "mountPath": "/etc/mooncake/keys"},
        {"name": "shared", "mountPath": "/shared"},
    ]
    env = [
        {"name": "MOONCAKE_CONFIG_DIR", "value": "/etc/mooncake"},
        {"name": "KEYS_DIR", "value": "/etc/mooncake/keys"},
        {"name": "SHARED_DIR", "value": "/shared"},
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    reader = python("reader", code, args=["$(MOONCAKE_CONFIG_DIR)"], env=env, volumeMounts=mounts)
    volumes = [
        {"name": "config", "configMap": {"name": "conf"}},
        {"name": "keys", "secret": {"secretName": "keys"}},
        {"name": "shared", "emptyDir": {}},
    ]
    world = World.of(
        [
            pod("reader-0", reader, volumes=volumes),
            {"kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"scheduler.json": "{}"}},
            {"kind": "Secret", "metadata": {"name": "keys"}, "data": {"key": "c2VjcmV0"}},
            {"kind": "Service", "metadata": {"name": "ignored"}},
        ]
    )
    async with LocalRuntime(folders) as runtime:
        runtime.start(world)
        log = folders.log("reader-0", "reader")
        await until(lambda: log.exists() and "reader-0 127.0.0.1 0" in log.read_text())
        assert (folders.pod("reader-0") / "shared" / "out").read_text() == "{}secret0o600"
        assert stat.S_IMODE(folders.run.stat().st_mode) == 0o700
    assert not folders.run.exists()


async def test_a_crashed_container_restarts_at_once_and_then_waits(folders: Folders) -> None:
    events: list[str] = []
    code = "import time; time.sleep(0.05); raise SystemExit(3)"
    async with LocalRuntime(folders, on_event=lambda p, c, line: events.append(line)) as runtime:
        runtime.start(World((pod("crash-0", python("main", code)),)))
        await until(lambda: len(events) >= 2)
        status = runtime.statuses()[0]
        assert not status.ready
    assert events[:2] == ["exited with 3; restarts now", "exited with 3; restarts in 1 s"]


async def test_who_gives_up_is_quoted_with_its_last_words(folders: Folders) -> None:
    events: list[str] = []
    code = "import sys; print('all is well'); sys.exit('no keys.json: make it\\n\\n')"
    async with LocalRuntime(folders, on_event=lambda p, c, line: events.append(line)) as runtime:
        runtime.start(World((pod("crash-0", python("main", code)),)))
        await until(lambda: len(events) >= 2)
        assert "no keys.json: make it" in runtime.statuses()[0].message
    assert events[0] == "exited with 1: no keys.json: make it; restarts now"


async def test_a_killed_container_is_replaced_and_its_children_are_gone(folders: Folders) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = folders.log("parent-0", "main")
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("parent-0", python("main", code)),)))
        await until(lambda: log.exists() and log.read_text().count("child") == 1)
        grandchild = int(log.read_text().split("child")[1].split()[0])
        first = pids(runtime)["parent-0/main"]
        runtime.kill_container("parent-0", "main")
        await until(lambda: log.read_text().count("child") == 2)
        assert pids(runtime)["parent-0/main"] != first
        assert gone(grandchild)
        assert runtime.statuses()[0].restarts == 1


async def test_a_failed_liveness_probe_restarts_the_container(
    folders: Folders, port: int, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    probe = {"httpGet": {"path": "/healthz", "port": port}, "periodSeconds": 0.1, "failureThreshold": 2}
    env = [{"name": "SICK_FILE", "value": str(sick)}]
    container = web(port, env=env, livenessProbe=probe, startupProbe=probe | {"failureThreshold": 100})
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("web-0", container),)))
        await runtime.wait_ready(20)
        sick.touch()
        await until(lambda: not runtime.statuses()[0].ready)
        sick.unlink()
        await runtime.wait_ready(20)
        assert runtime.statuses()[0].restarts >= 1


async def test_readiness_follows_the_probe_without_a_restart(
    folders: Folders, port: int, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    probe = {"httpGet": {"path": "/readyz", "port": port}, "periodSeconds": 0.05, "failureThreshold": 1}
    container = web(port, env=[{"name": "READY_FILE", "value": str(gate)}], readinessProbe=probe)
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("web-0", container),)))
        await runtime.wait_ready(20)
        gate.unlink()
        await until(lambda: not runtime.statuses()[0].ready)
        with pytest.raises(LocalRuntimeError, match=r"web-0 .*503"):
            await runtime.wait_ready(0.2)
        gate.touch()
        await runtime.wait_ready(20)
        assert runtime.statuses()[0].restarts == 0


async def test_the_hook_runs_before_sigterm_and_a_deaf_process_is_killed_after_its_grace(
    folders: Folders,
) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('sigterm', flush=True))\n"
        "print('here', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    hook = {"exec": {"command": ["python", "-S", "-c", "print('hook', flush=True)"]}}
    container = python("main", code, lifecycle={"preStop": hook})
    events: list[str] = []
    log = folders.log("deaf-0", "main")
    async with LocalRuntime(folders, on_event=lambda p, c, line: events.append(line)) as runtime:
        runtime.start(World((pod("deaf-0", container, terminationGracePeriodSeconds=1),)))
        await until(lambda: log.exists() and "here" in log.read_text())
        pid = pids(runtime)["deaf-0/main"]
        assert pid is not None
        await runtime.stop()
        assert gone(pid)
    text = log.read_text()
    assert text.index("hook") < text.index("sigterm")
    assert any("killed" in line for line in events)


async def test_init_containers_end_first_and_sidecars_outlive_the_main_container(folders: Folders) -> None:
    write = "import os; open(os.environ['D'] + '/order', 'a').write('{}')"
    say = (
        "import os, signal, sys, time\n"
        "def note(text): open(os.environ['D'] + '/order', 'a').write(text)\n"
        "def leave(*_):\n    note('{0} ends ')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "note('{0} runs ')\n"
        "while True: time.sleep(1)\n"
    )
    shared = {
        "env": [{"name": "D", "value": "/d"}],
        "volumeMounts": [{"name": "d", "mountPath": "/d"}],
    }
    order = folders.pod("p-0") / "d" / "order"
    check = f"assert 'side' in open({str(order)!r}).read()"
    started = {"exec": {"command": ["python", "-S", "-c", check]}}
    quick = {"periodSeconds": 0.05, "timeoutSeconds": 5, "failureThreshold": 200}
    sidecar = python(
        "side", say.format("side"), restartPolicy="Always", startupProbe=started | quick, **shared
    )
    async with LocalRuntime(folders) as runtime:
        manifest = pod(
            "p-0",
            python("main", say.format("main"), **shared),
            initContainers=[python("first", write.format("first "), **shared), sidecar],
            volumes=[{"name": "d", "emptyDir": {}}],
        )
        runtime.start(World((manifest,)))
        await until(lambda: order.exists() and "main runs" in order.read_text())
        await runtime.stop()
        assert order.read_text() == "first side runs main runs main ends side ends "


async def test_a_second_runtime_of_the_same_cluster_is_refused(folders: Folders) -> None:
    async with LocalRuntime(folders) as runtime:
        runtime.announce(endpoint="http://127.0.0.1:8000")
        with pytest.raises(LocalRuntimeError, match=r"already up at http://127.0.0.1:8000"):
            await LocalRuntime(folders).__aenter__()
    async with LocalRuntime(folders):
        pass


async def test_a_pod_that_cannot_run_here_starts_nothing(folders: Folders) -> None:
    claim = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    async with LocalRuntime(folders) as runtime:
        with pytest.raises(LocalRuntimeError, match=r"Pod b: spec.volumes\[models\]: persistentVolumeClaim"):
            runtime.start(World((pod("a", python("c", SLEEP)), pod("b", python("c", SLEEP), volumes=claim))))
        assert runtime.statuses() == []


async def test_a_program_that_is_not_there_is_named_in_the_log(folders: Folders) -> None:
    missing = {"name": "main", "command": ["no-such-program-here"]}
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("p", missing),)))
        log = folders.log("p", "main")
        await until(lambda: log.exists() and "no-such-program-here: No such file" in log.read_text())
        await until(lambda: "127" in runtime.statuses()[0].message)


async def test_logs_are_bounded_and_writers_go_on(folders: Folders) -> None:
    code = "import time\nwhile True: print('x' * 100, flush=True); time.sleep(0.01)"
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("talker", python("main", code)),)))
        log = folders.log("talker", "main")
        await until(lambda: log.exists() and log.stat().st_size > 2000)
        runtime._machine.bound_logs(longest_bytes=1000)
        assert log.stat().st_size < 2000
        assert log.with_suffix(".log.1").stat().st_size > 1000
        await until(lambda: log.stat().st_size > 300)


RUNTIME_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from mooncakectl.local import Folders, LocalRuntime, World

async def main():
    state, run, pods = sys.argv[1:]
    folders = Folders("tested", Path(state), Path(run))
    async with LocalRuntime(folders) as runtime:
        runtime.start(World(tuple(json.loads(pods))))
        await runtime.wait_ready(30)
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_is_left_after_kill_9_of_the_runtime_and_a_second_start(folders: Folders) -> None:
    # One child that dies with its parent, one grandchild in the container's session, and one that left it.
    code = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "a = subprocess.Popen(sleep)\n"
        "b = subprocess.Popen(sleep, start_new_session=True)\n"
        "print('children', a.pid, b.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    manifests = json.dumps([pod("a", python("main", code)), pod("b", python("main", SLEEP))])
    bystander = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", SLEEP, stdout=-3)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUNTIME_PROGRAM, str(folders.state), str(folders.run), manifests),
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    assert await asyncio.wait_for(program.stdout.readline(), 30) == b"up\n"
    log = folders.log("a", "main")
    await until(lambda: "children" in log.read_text())
    grandchildren = [int(word) for word in log.read_text().split("children")[1].split()[:2]]
    state = json.loads((folders.state / "state.json").read_text())
    containers = [process["identity"]["pid"] for process in state["processes"]]
    assert len(containers) == 2

    program.send_signal(signal.SIGKILL)
    await program.communicate()
    await until(lambda: all(gone(pid) for pid in containers))  # the kernel ends what the runtime started
    assert not any(gone(pid) for pid in grandchildren)

    async with LocalRuntime(folders) as runtime:
        assert runtime.leftovers_ended == 2
        assert all(gone(pid) for pid in grandchildren)
    assert not folders.run.exists()
    assert bystander.returncode is None
    bystander.kill()
    await bystander.wait()


async def test_a_foreign_process_with_a_recorded_number_is_left_alone(folders: Folders) -> None:
    foreign = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", SLEEP, start_new_session=True, stdout=-3
    )
    found = read_stat(foreign.pid)
    assert found is not None
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("a", python("main", SLEEP)),)))
        await runtime.wait_ready(20)
        record = json.loads((folders.state / "state.json").read_text())
    # As if the killed container's number had gone to somebody else, who started later.
    record["processes"][0]["identity"] = {"pid": foreign.pid, "start_ticks": found.identity.start_ticks - 1}
    (folders.state / "state.json").write_text(json.dumps(record))
    async with LocalRuntime(folders) as runtime:
        assert runtime.leftovers_ended == 0
    assert is_running(found.identity)
    foreign.kill()
    await foreign.wait()


async def test_a_foreign_process_may_be_called_whatever_it_likes(folders: Folders, tmp_path: Path) -> None:
    # Half a letter, as when the kernel cuts a long name; and what ends a name elsewhere.
    program = os.fsencode(tmp_path) + b"/) Z \xc3"
    shutil.copy("/bin/sleep", program)
    foreign = await asyncio.create_subprocess_exec(program, "60")
    try:
        found = read_stat(foreign.pid)
        assert found is not None
        assert not found.is_zombie
        async with LocalRuntime(folders) as runtime:
            runtime.start(World((pod("a", python("main", SLEEP)),)))
            await runtime.wait_ready(20)
            (first,) = pids(runtime).values()
            runtime.kill_container("a", "main")
            await until(lambda: pids(runtime)["a/main"] not in (None, first))
            runtime.kill()
        assert foreign.returncode is None
    finally:
        foreign.kill()
        await foreign.wait()


async def test_killing_cuts_a_long_stop_short(folders: Folders) -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    )
    hook = {"exec": {"command": ["python", "-S", "-c", "import time; time.sleep(600)"]}}
    log = folders.log("slow", "main")
    async with LocalRuntime(folders) as runtime:
        manifest = pod("slow", python("main", code, lifecycle={"preStop": hook}))
        runtime.start(
            World((manifest | {"spec": manifest["spec"] | {"terminationGracePeriodSeconds": 900}},))
        )
        await until(lambda: log.exists() and "here" in log.read_text())
        stopping = asyncio.create_task(runtime.stop())
        await asyncio.sleep(0.3)
        assert not stopping.done()
        began = time.monotonic()
        runtime.kill()
        await asyncio.wait_for(stopping, 30)
        assert time.monotonic() - began < 25


async def test_an_instance_that_lost_an_engine_starts_anew_as_a_whole_and_others_are_left_alone(
    folders: Folders,
) -> None:
    shared = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    mark = "import pathlib; place = pathlib.Path('/scratch/life'); print(place.exists(), flush=True);"
    mounts = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    engine = python("engine", f"{mark} place.touch(); {SLEEP}", **mounts)
    pods = (
        member("a", "a", engine, python("sidecar", SLEEP), **shared),
        member("a-w1", "a", engine, **shared),
        member("b", "b", python("engine", SLEEP)),
    )
    events: list[tuple[str, str]] = []
    async with LocalRuntime(folders, on_event=lambda where, _, line: events.append((where, line))) as runtime:
        runtime.start(World(pods))
        await until(lambda: all(status.ready for status in runtime.statuses()))
        first = pids(runtime)
        runtime.kill_container("a-w1", "engine")
        whole = ["a/engine", "a/sidecar", "a-w1/engine"]
        await until(lambda: all(pids(runtime)[one] not in (None, first[one]) for one in whole))
        await until(lambda: all(status.ready for status in runtime.statuses()))
        assert pids(runtime)["b/engine"] == first["b/engine"]
        assert all(gone(first[one]) for one in whole)
        assert [s.restarts for s in runtime.statuses()] == [0, 0, 0], "they are new Pods"
        assert ("a-w1", "killed by signal 9; all 2 Pods of a start anew") in events
        await until(lambda: "False" in runtime.log("a", "engine").read_text())
        assert "True" not in runtime.log("a", "engine").read_text(), "with volumes of their own"


async def test_a_sidecar_that_ends_restarts_alone(folders: Folders) -> None:
    pods = (
        member("a", "a", python("engine", SLEEP), python("sidecar", SLEEP)),
        member("a-w1", "a", python("engine", SLEEP)),
    )
    async with LocalRuntime(folders) as runtime:
        runtime.start(World(pods))
        await until(lambda: all(status.ready for status in runtime.statuses()))
        first = pids(runtime)
        runtime.kill_container("a", "sidecar")
        await until(lambda: pids(runtime)["a/sidecar"] not in (None, first["a/sidecar"]))
        assert {**pids(runtime), "a/sidecar": 0} == {**first, "a/sidecar": 0}


async def test_what_is_stopped_does_not_start_anew(folders: Folders) -> None:
    pods = (member("a", "a", python("engine", SLEEP)), member("a-w1", "a", python("engine", SLEEP)))
    async with LocalRuntime(folders) as runtime:
        runtime.start(World(pods))
        await until(lambda: all(status.ready for status in runtime.statuses()))
        first = [pid for pid in pids(runtime).values() if pid]
        await runtime.stop()
        assert all(map(gone, first))
        assert set(pids(runtime).values()) == {None}


async def test_a_full_disk_keeps_nothing_from_running_and_is_told(folders: Folders) -> None:
    events: list[str] = []
    async with LocalRuntime(folders, on_event=lambda pod, name, line: events.append(line)) as runtime:
        log = folders.log("a", "main")
        log.parent.mkdir(parents=True)
        log.symlink_to("/dev/full")
        # Where the list of processes is written first.
        (folders.state / "state.new").mkdir()
        runtime.start(World((pod("a", python("main", "import time; time.sleep(600)")),)))
        await runtime.wait_ready(20)
        assert events == [f"its log cannot be written: {log}: No space left on device"]
        (pid,) = pids(runtime).values()
    assert pid is not None
    assert gone(pid)
    assert not folders.run.exists()


async def test_a_pod_whose_volumes_cannot_be_made_says_so(folders: Folders) -> None:
    events: list[tuple[str, str]] = []
    scratch = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    async with LocalRuntime(folders, on_event=lambda pod, _, line: events.append((pod, line))) as runtime:
        place = folders.pod("a") / "scratch"
        place.parent.mkdir()
        place.write_text("a file, where a folder is wanted")
        runtime.start(World((pod("a", python("main", SLEEP), **scratch), pod("b", python("main", SLEEP)))))
        await until(lambda: bool(events))
        with pytest.raises(LocalRuntimeError, match=rf"a \(main: could not be started: {place}: File exists"):
            await runtime.wait_ready(0.1)
        await until(lambda: [status.ready for status in runtime.statuses()] == [False, True])
    assert events == [("a", f"could not be started: {place}: File exists")]


async def test_a_log_that_cannot_be_kept_is_emptied_all_the_same(folders: Folders) -> None:
    async with LocalRuntime(folders) as runtime:
        runtime.start(World((pod("a", python("main", SLEEP)), pod("b", python("main", SLEEP)))))
        await until(lambda: all(status.ready for status in runtime.statuses()))
        await until(lambda: all("here" in runtime.log(name, "main").read_text() for name in ("a", "b")))
        for name in ("a", "b"):
            runtime.log(name, "main").write_bytes(b"x" * 5_000)
            runtime.log(name, "main").with_suffix(".log.1").symlink_to("/dev/full")
        runtime._machine.bound_logs(longest_bytes=4_000)
        for name in ("a", "b"):
            assert runtime.log(name, "main").stat().st_size == 0
            assert not runtime.log(name, "main").with_suffix(".log.1").exists()
