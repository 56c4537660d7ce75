"""How full a cluster's stores are: schedulers do not know, the stores' masters do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One KV cache pool; None where its master does not say, or cannot be reached from here."""

    id: str
    dram_bytes: float | None = None
    dram_capacity_bytes: float | None = None
    ssd_bytes: float | None = None
    ssd_capacity_bytes: float | None = None
    blocks: int | None = None


async def ask_stores(instances: Iterable[Mapping[str, Any]]) -> list[StoreRow]:
    """Ask the master of each store among what `GET /instances` lists."""
    stores = [item for item in instances if item.get("role") == "store"]
    if not stores:
        return []
    # Masters speak plain HTTP: reading this machine's certificates would take longer than asking.
    without_certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=without_certificates) as http:
        return list(await asyncio.gather(*(_ask(http, store) for store in stores)))


async def _ask(http: httpx.AsyncClient, store: Mapping[str, Any]) -> StoreRow:
    name = str(store.get("id", ""))
    try:
        answer = await http.get(f"{store.get('url', '')}/metrics")
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL):
        return StoreRow(name)
    return store_row(name, answer.text)


def store_row(name: str, exposition: str) -> StoreRow:
    """A store from its master's metrics (Mooncake 0.3.13, `master_metric_manager.cpp`)."""
    samples: dict[str, float] = {}
    for line in exposition.splitlines():
        metric, _, value = line.partition(" ")
        if metric in _METRICS:
            try:
                samples[metric] = float(value)
            except ValueError:
                continue
    keys = samples.get("master_key_count")
    return StoreRow(
        name,
        dram_bytes=samples.get("master_allocated_bytes"),
        dram_capacity_bytes=samples.get("master_total_capacity_bytes"),
        ssd_bytes=samples.get("master_allocated_file_size_bytes"),
        ssd_capacity_bytes=samples.get("master_total_file_capacity_bytes"),
        blocks=None if keys is None else int(keys),
    )


_METRICS = frozenset(
    (
        "master_allocated_bytes",
        "master_total_capacity_bytes",
        "master_allocated_file_size_bytes",
        "master_total_file_capacity_bytes",
        "master_key_count",
    )
)
