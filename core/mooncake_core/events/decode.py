"""KV event payloads to values: vLLM's array and map encodings, and what SGLang does differently."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import msgspec

from mooncake_core.events.model import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from mooncake_core.index.contract import Tier

_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")

_TIERS: Final[Mapping[str, Tier]] = {
    "": Tier.HBM,
    "gpu": Tier.HBM,
    "cpu": Tier.DRAM,
    "cpu_pinned": Tier.DRAM,
    "storage": Tier.SSD,
    "disk": Tier.SSD,
    "external": Tier.SSD,
}
_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_INT64_MIN: Final = -(1 << 63)
_MASK_U64: Final = (1 << 64) - 1
_SHOWN: Final = 60


class EventDecodeError(ValueError):
    """A payload that is not a batch of KV events; says which event and field, and what is wrong with it."""


class _Skipped(Exception):
    """An event that is well formed but not for us."""

    def __init__(self, unknown: str | None = None) -> None:
        self.unknown = unknown


def decode_batch(payload: bytes | bytearray | memoryview) -> EventBatch:
    """Decode one published payload, `[ts, [event, …], data_parallel_rank]` in MessagePack.

    Events may be maps with a `type` or arrays that begin with it; every optional field may be missing, and
    fields beyond those known are ignored. Events of unknown types or media and of other cache groups are
    skipped and counted in the result.

    Raises:
        EventDecodeError: the payload is malformed.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise EventDecodeError(f"payload is not MessagePack: {error}") from None
    if not isinstance(raw, list) or len(raw) < 2:
        raise EventDecodeError(f"payload: expected [ts, events, dp_rank], got {_show(raw)}")
    ts, raw_events = raw[0], raw[1]
    dp_rank = raw[2] if len(raw) > 2 else None
    if isinstance(ts, bool) or not isinstance(ts, int | float):
        raise EventDecodeError(f"ts: expected a number of seconds, got {_show(ts)}")
    if not isinstance(raw_events, list):
        raise EventDecodeError(f"events: expected an array, got {_show(raw_events)}")
    if dp_rank is not None and not _is_int(dp_rank):
        raise EventDecodeError(f"data_parallel_rank: expected an int or nil, got {_show(dp_rank)}")

    events: list[Event] = []
    unknown: list[str] = []
    other_groups = 0
    for place, raw_event in enumerate(raw_events):
        try:
            events.append(_event(raw_event))
        except _Skipped as skipped:
            if skipped.unknown is None:
                other_groups += 1
            else:
                unknown.append(skipped.unknown)
        except EventDecodeError as error:
            raise EventDecodeError(f"events[{place}]: {error}") from None
    return EventBatch(
        ts=float(ts),
        events=tuple(events),
        dp_rank=dp_rank,
        unknown=tuple(unknown),
        other_groups=other_groups,
    )


def _event(raw: Any) -> Event:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind, fields = raw[0], None
    else:
        raise EventDecodeError(f"expected a map or a non-empty array, got {_show(raw)}")
    if not isinstance(kind, str):
        raise EventDecodeError(f"type: expected a string, got {_show(kind)}")
    known = _KINDS.get(kind)
    if known is None:
        raise _Skipped(kind[:_SHOWN])
    names, build = known
    if fields is None:
        fields = dict(zip(names, raw[1:], strict=False))
    try:
        return build(fields)
    except EventDecodeError as error:
        raise EventDecodeError(f"{kind}.{error}") from None


def _block_stored(fields: Mapping[str, Any]) -> BlockStored:
    _only_full_attention(fields)
    medium = _tier(fields)
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    block_size = fields.get("block_size")
    if not _is_int(block_size) or block_size < 1:
        raise EventDecodeError(f"block_size: expected a positive int, got {_show(block_size)}")
    token_ids = _token_ids(fields)
    if len(token_ids) != len(hashes) * block_size:
        raise EventDecodeError(
            f"token_ids: {len(token_ids)} ids for {len(hashes)} blocks of {block_size} tokens"
        )
    lora_name, salt = _names(fields)
    opaque_from = None
    if lora_name is None and fields.get("lora_id") is not None:
        # Engines before vLLM 0.17 number their adapters: the number says nothing beyond that process.
        opaque_from = 0
    extra_salt, opaque_extra = _extra_keys(fields, parent is None, lora_name, len(hashes))
    if opaque_from is None:
        opaque_from = opaque_extra
    return BlockStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent, "parent_block_hash"),
        token_ids=token_ids,
        block_size=block_size,
        medium=medium,
        lora_name=lora_name,
        cache_salt=(salt or extra_salt) if parent is None else None,
        opaque_from=opaque_from,
        remote=_remote(fields),
    )


def _block_removed(fields: Mapping[str, Any]) -> BlockRemoved:
    _only_full_attention(fields)
    return BlockRemoved(hashes=_hashes(fields), medium=_tier(fields), remote=_remote(fields))


def _all_blocks_cleared(fields: Mapping[str, Any]) -> AllBlocksCleared:
    return AllBlocksCleared()


_KINDS: Final[Mapping[str, tuple[Sequence[str], Callable[[Mapping[str, Any]], Event]]]] = {
    "BlockStored": (_STORED_FIELDS, _block_stored),
    "BlockRemoved": (_REMOVED_FIELDS, _block_removed),
    "AllBlocksCleared": ((), _all_blocks_cleared),
}


def _only_full_attention(fields: Mapping[str, Any]) -> None:
    group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
    if group is not None and not _is_int(group):
        raise EventDecodeError(f"group_idx: expected an int or nil, got {_show(group)}")
    if kind is not None and not isinstance(kind, str):
        raise EventDecodeError(f"kv_cache_spec_kind: expected a string or nil, got {_show(kind)}")
    # Removals carry the group's number but not its kind, so that one fixed group has to be followed.
    if group or (kind and kind not in _FULL_ATTENTION):
        raise _Skipped


def _tier(fields: Mapping[str, Any]) -> Tier:
    medium = fields.get("medium")
    if medium is None:
        return Tier.HBM
    if not isinstance(medium, str):
        raise EventDecodeError(f"medium: expected a string or nil, got {_show(medium)}")
    tier = _TIERS.get(medium.lower())
    if tier is None:
        raise _Skipped(f"medium {medium[:_SHOWN]}")
    return tier


def _hashes(fields: Mapping[str, Any]) -> tuple[BlockHash, ...]:
    raw = fields.get("block_hashes")
    if not isinstance(raw, list):
        raise EventDecodeError(f"block_hashes: expected an array, got {_show(raw)}")
    return tuple([_hash(item, "block_hashes") for item in raw])


def _hash(raw: Any, field: str) -> BlockHash:
    if isinstance(raw, bytes):
        if not raw:
            raise EventDecodeError(f"{field}: a hash of no bytes")
        return raw
    if not _is_int(raw) or not _INT64_MIN <= raw <= _MASK_U64:
        raise EventDecodeError(f"{field}: expected 64-bit ints or bytes, got {_show(raw)}")
    # SGLang sends the same bits as a signed int.
    return int(raw) & _MASK_U64


def _token_ids(fields: Mapping[str, Any]) -> array[int]:
    raw = fields.get("token_ids")
    if not isinstance(raw, list):
        raise EventDecodeError(f"token_ids: expected an array, got {_show(raw)}")
    try:
        return array("I", raw)
    except (TypeError, OverflowError):
        raise EventDecodeError("token_ids: expected unsigned 32-bit ints") from None


def _names(fields: Mapping[str, Any]) -> tuple[str | None, str | None]:
    lora_name: Any = fields.get("lora_name")
    salt: Any = fields.get("cache_salt")
    if isinstance(lora_name, dict):
        # SGLang's array form carries a map of metadata where vLLM's has the name of the adapter.
        lora_name, salt = None, lora_name.get("cache_salt")
    for field, value in (("lora_name", lora_name), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise EventDecodeError(f"{field}: expected a string or nil, got {_show(value)}")
    return lora_name or None, salt or None


def _extra_keys(
    fields: Mapping[str, Any], at_start: bool, lora_name: str | None, blocks: int
) -> tuple[str | None, int | None]:
    """The salt, and the first block whose content more than its tokens decides.

    vLLM lists, block by block and without tags: the LoRA's name, image keys, the salt (a prompt's first block
    only), and a digest of prompt embeddings. A lone string in the first block is taken for the salt: were it
    an image's key (vLLM before 0.19 sends it bare), the block would get a key that no prompt ever asks for.
    """
    raw = fields.get("extra_keys")
    if raw is None:
        return None, None
    if not isinstance(raw, list):
        raise EventDecodeError(f"extra_keys: expected an array or nil, got {_show(raw)}")
    salt: str | None = None
    for block, items in enumerate(raw[:blocks]):
        if items is None:
            continue
        if not isinstance(items, list):
            raise EventDecodeError(f"extra_keys[{block}]: expected an array or nil, got {_show(items)}")
        rest = list(items)
        if lora_name is not None and lora_name in rest:
            rest.remove(lora_name)
        if block == 0 and at_start and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest[0] or None
        elif rest:
            return salt, block
    return salt, None


def _remote(fields: Mapping[str, Any]) -> bool:
    return fields.get("locality") == "REMOTE"


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = "nothing" if value is None else f"{type(value).__name__} {value!r}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
