"""How engines exchange KV: vLLM's `--kv-transfer-config`, and the store's client configuration.

Source: vLLM 0.32, docs/features/mooncake_connector_usage.md and distributed/mooncake_store.py.
"""

from __future__ import annotations

from typing import Any

from mooncake_core.config.scheduler import FIRST_TOKEN_TIMEOUT_S
from mooncake_core.registry import Role
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.names import Port

_LOCAL_BUFFER = "1GB"
STAGED_KV_S = int(FIRST_TOKEN_TIMEOUT_S) + 15
"""Seconds for which a prefill engine keeps KV that nobody fetches: schedulers gave the decode up by then.
vLLM's own limit is 480."""
STAGED_LEASE_S = 30
"""The same over NIXL, where the decode engine extends it by heartbeats (six in that time) while its request
waits; much less, and a decode that stands still for a moment loses what it was about to fetch."""
_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


def transfer_config(plan: Plan, role: Role) -> dict[str, Any]:
    """The document behind `--kv-transfer-config` of an engine of this role."""
    connector = plan.cluster.spec.engine.connector
    hand_over: dict[str, Any] = {"kv_connector": connector, "kv_role": _ROLES[role]}
    if connector == "MooncakeConnector":
        protocol = plan.cluster.spec.network.protocol.lower()
        hand_over["kv_connector_extra_config"] = {"mooncake_protocol": protocol}
    elif connector == "NixlConnector":
        hand_over["kv_connector_extra_config"] = {"kv_lease_duration": STAGED_LEASE_S}
    if plan.store is None:
        return hand_over
    store: dict[str, Any] = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    if role is Role.DECODE:
        # The next turn's prompt has this turn's answer in it: without this its blocks are computed again.
        store["kv_connector_extra_config"] = {"save_decode_cache": True}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": _ROLES[role],
        "kv_connector_extra_config": {"connectors": [hand_over, store]},
    }


def must_hide_statistics(plan: Plan) -> bool:
    """Whether vLLM must run with `--disable-log-stats`.

    MultiConnector asserts that each connector knows Prometheus, which MooncakeConnector does not: the API
    server dies with the first transfer (vllm#43828). The price is that there are no metrics at all then.
    """
    connector = plan.cluster.spec.engine.connector
    return not plan.simulated and plan.store is not None and connector == "MooncakeConnector"


def store_client_config(plan: Plan) -> dict[str, Any]:
    """The document behind `MOONCAKE_CONFIG_PATH`: engines bring no segment, the pool's nodes do.

    Raises:
        ValueError: the cluster has no store.
    """
    return {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master_address(plan),
        "protocol": plan.cluster.spec.network.protocol.lower(),
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": _LOCAL_BUFFER,
    }


def master_address(plan: Plan) -> str:
    """host:port of the master's RPC."""
    return f"{_master_host(plan)}:{_master_port(plan, Port.MASTER_RPC)}"


def master_url(plan: Plan) -> str:
    """Base URL of the master's HTTP endpoint."""
    return f"http://{_master_host(plan)}:{_master_port(plan, Port.MASTER_HTTP)}"


def _master_host(plan: Plan) -> str:
    if plan.store is None:
        raise ValueError(f"cluster {plan.name} has no KV cache pool")
    return plan.names.service_host(plan.store.master_service, plan.namespace)


def _master_port(plan: Plan, offset: Port) -> int:
    if plan.store is None:
        raise ValueError(f"cluster {plan.name} has no KV cache pool")
    return plan.names.port(plan.store.masters()[0], offset)
