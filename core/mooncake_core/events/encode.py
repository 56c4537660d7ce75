"""KV event values to payloads, as vLLM publishes them (map form since 0.25, array form before)."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from mooncake_core.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from mooncake_core.index.contract import Tier

_MEDIA: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.SSD: "STORAGE"}
_encoder: Final = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch, form: Literal["map", "array"] = "map") -> bytes:
    """Encode a batch as `[ts, [event, …], dp_rank]`; what `decode_batch` reads back.

    Raises:
        ValueError: an event cannot be said on the wire (a salt on blocks that do not begin a prompt, several
            tiers at once, blocks that tokens do not determine).
    """
    write = _as_map if form == "map" else _as_array
    return _encoder.encode([batch.ts, [write(event) for event in batch.events], batch.dp_rank])


def _as_map(event: Event) -> dict[str, Any]:
    kind = type(event).__name__
    if isinstance(event, AllBlocksCleared):
        return {"type": kind}
    if isinstance(event, BlockRemoved):
        removed = {"type": kind, "block_hashes": event.hashes, "medium": _medium(event), "group_idx": 0}
        return removed | _locality(event)
    return {
        "type": kind,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids.tolist(),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _medium(event),
        "lora_name": event.lora_name,
        "extra_keys": _extra_keys(event),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | _locality(event)


def _as_array(event: Event) -> list[Any]:
    fields = _as_map(event)
    if isinstance(event, BlockStored) and event.remote:
        locality = fields.pop("locality")
        return [*fields.values(), None, locality]
    return list(fields.values())


def _medium(event: BlockStored | BlockRemoved) -> str:
    name = _MEDIA.get(event.medium)
    if name is None:
        raise ValueError(f"{event.medium!r}: an event speaks of one tier")
    return name


def _locality(event: BlockStored | BlockRemoved) -> dict[str, str]:
    return {"locality": "REMOTE"} if event.remote else {}


def _extra_keys(event: BlockStored) -> list[list[str] | None]:
    if event.opaque_from is not None:
        raise ValueError(
            "blocks that tokens do not determine cannot be encoded: what decides them is unknown"
        )
    if event.cache_salt and event.parent is not None:
        raise ValueError("cache_salt: only a prompt's first block carries it; this one has a parent")
    lora = [event.lora_name] if event.lora_name else None
    keys: list[list[str] | None] = [lora for _ in event.hashes]
    if keys and event.cache_salt:
        keys[0] = [*(lora or ()), event.cache_salt]
    return keys
