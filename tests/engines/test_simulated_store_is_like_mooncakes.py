"""A sidecar's store client: the scripted exchange sees no difference that is not listed with its reason."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_testing import lookup_exchange
from mooncake_testing.lookup_exchange import LEASE_MS, SEGMENT_BYTES, WATERMARK
from mooncake_testing.ports import free_port
from mooncake_testing.vllm_environment import EngineEnvironment, ensure_environment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parent
DIFFERENCES = FOLDER / "store_differences.yaml"
# -P: its folder has a module called redis, of which no other is to know.
EXCHANGE = ["-P", lookup_exchange.__file__]

# A hanging master is waited for as long as the first says, an absent one is tried as often as the second.
CALLER = {"MC_RPC_TIMEOUT_MS": "1000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
SSD_BYTES, AT_ONCE = 1 << 30, 64


@pytest.fixture
def real(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The exchange with Mooncake's own master, node and binding."""
    environment = ensure_environment()
    programs = next((environment.python.parents[1] / "lib").glob("python3.*/site-packages/mooncake"))
    rpc, admin, node = free_port(), free_port(), free_port()
    offload = {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(tmp_path / "ssd"),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(SSD_BYTES),
    }
    (tmp_path / "ssd").mkdir()
    with contextlib.ExitStack() as stack:
        master = started(
            stack, environment, tmp_path / "master.log", programs / "mooncake_master",
            "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
            f"--metrics_port={admin}", f"--default_kv_lease_ttl={LEASE_MS}", "--enable_offload=true",
            f"--eviction_high_watermark_ratio={WATERMARK}", "--promotion_on_hit=true",
            f"--promotion_max_per_heartbeat={AT_ONCE}",
        )  # fmt: skip
        started(
            stack, environment, tmp_path / "node.log", programs / "mooncake_client", "--host=127.0.0.1",
            f"--port={node}", f"--global_segment_size={SEGMENT_BYTES}",
            f"--master_server_address=127.0.0.1:{rpc}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
            "--enable_offload=true", variables=offload,
        )  # fmt: skip
        yield exchange(
            stack, environment.python, environment.variables(), "mooncake.store", rpc, admin, master.pid
        )


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The same exchange with the simulated ones."""
    rpc, admin, node, node_http = free_port(), free_port(), free_port(), free_port()
    program = [sys.executable, "-m", "mooncake_simulator.store"]
    with contextlib.ExitStack() as stack:
        master = started(
            stack, None, tmp_path / "simulated-master.log", *program, "master", "--host", "127.0.0.1",
            "--rpc-port", str(rpc), "--metrics-port", str(admin), "--default-kv-lease-ttl", str(LEASE_MS),
            "--eviction-high-watermark-ratio", str(WATERMARK), "--promotion-on-hit", "true",
            "--promotion-max-per-heartbeat", str(AT_ONCE),
        )  # fmt: skip
        started(
            stack, None, tmp_path / "simulated-node.log", *program, "node", "--port", str(node),
            "--http-port", str(node_http), "--global-segment-size", str(SEGMENT_BYTES),
            "--ssd-size", str(SSD_BYTES), "--master-server-address", f"127.0.0.1:{rpc}",
        )  # fmt: skip
        module = "mooncake_simulator.store.client"
        yield exchange(stack, sys.executable, dict(os.environ), module, rpc, admin, master.pid)


def started(
    stack: contextlib.ExitStack,
    environment: EngineEnvironment | None,
    log: Path,
    *command: Path | str,
    variables: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A process that ends with the stack, by force: it may hang."""
    inherited = dict(os.environ) if environment is None else environment.variables()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command], env=inherited | (variables or {}), stdout=output, stderr=output
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def exchange(
    stack: contextlib.ExitStack,
    interpreter: Path | str,
    variables: dict[str, str],
    module: str,
    rpc: int,
    admin: int,
    master_pid: int,
) -> subprocess.Popen[str]:
    """The exchange, begun when the store has its segment."""
    wait_for_a_segment(f"http://127.0.0.1:{admin}")
    words = [interpreter, *EXCHANGE, module, f"127.0.0.1:{rpc}", f"http://127.0.0.1:{admin}", master_pid]
    process = subprocess.Popen(
        [str(word) for word in words],
        env=variables | CALLER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def wait_for_a_segment(admin_url: str, within_s: float = 60) -> None:
    """Until a node lends its memory."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if opener.open(f"{admin_url}/get_all_segments", timeout=2).read().strip():
                return
        time.sleep(0.1)
    raise AssertionError(f"{admin_url}: no segment within {within_s} s")


def facts(process: subprocess.Popen[str]) -> set[str]:
    """One line for each thing that was seen."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, f"{output[-500:]}\n{errors[-3000:]}"
    seen: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {f"{name}: {json.dumps(value, sort_keys=True)}" for name, value in seen.items()}


def test_lookups_of_a_simulated_store_show_no_difference_that_is_not_listed_with_its_reason(
    real: subprocess.Popen[str], simulated: subprocess.Popen[str]
) -> None:
    of_mooncake, of_ours = facts(real), facts(simulated)
    listed = yaml.safe_load(DIFFERENCES.read_text())
    assert all(entry["why"].strip() for entry in listed)
    expected = {fact for entry in listed for fact in entry["facts"]}
    found = {f"mooncake: {fact}" for fact in of_mooncake - of_ours}
    found |= {f"simulated: {fact}" for fact in of_ours - of_mooncake}
    unlisted, gone = sorted(found - expected), sorted(expected - found)
    assert not unlisted, "\n".join(["differences that nobody has explained:", *unlisted])
    assert not gone, "\n".join(["listed differences that are gone; take them off the list:", *gone])
