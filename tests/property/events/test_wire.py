from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecodeError,
    decode_batch,
    encode_batch,
)
from mooncake_core.index.contract import Tier

hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
tiers = st.sampled_from(list(Tier))


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    names = draw(st.lists(hashes, min_size=1, max_size=4))
    size = draw(st.integers(1, 5))
    parent = draw(st.none() | hashes)
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(names), max_size=size * len(names)))
    return BlockStored(
        hashes=tuple(names),
        parent=parent,
        token_ids=array("I", ids),
        block_size=size,
        medium=draw(tiers),
        lora_name=draw(st.none() | st.text(min_size=1, max_size=5)),
        cache_salt=draw(st.none() | st.text(min_size=1, max_size=5)) if parent is None else None,
        remote=draw(st.booleans()),
    )


removed = st.builds(
    BlockRemoved, hashes=st.lists(hashes, max_size=4).map(tuple), medium=tiers, remote=st.booleans()
)
batches = st.builds(
    EventBatch,
    ts=st.floats(0, 2e9),
    events=st.lists(stored() | removed | st.just(AllBlocksCleared()), max_size=4).map(tuple),
    dp_rank=st.none() | st.integers(0, 7),
)


@given(batches, st.sampled_from(["map", "array"]))
def test_what_is_encoded_is_decoded_again(batch: EventBatch, form: Any) -> None:
    assert decode_batch(encode_batch(batch, form)) == batch


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "type"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
fields = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        name: values
        for name in (
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
            "locality",
            "cache_salt",
        )
    },
)


def _decodes_or_refuses(data: bytes) -> None:
    with suppress(EventDecodeError):
        decode_batch(data)


@given(st.binary(max_size=60))
def test_no_bytes_whatever_crash_the_decoder(data: bytes) -> None:
    _decodes_or_refuses(data)


@given(values, st.lists(fields | values, max_size=3), values)
def test_no_structure_whatever_crashes_the_decoder(ts: Any, events: list[Any], rank: Any) -> None:
    _decodes_or_refuses(msgspec.msgpack.encode([ts, events, rank]))


@given(batches, st.data())
def test_a_damaged_batch_is_decoded_or_refused(batch: EventBatch, data: st.DataObject) -> None:
    wire = bytearray(encode_batch(batch))
    place = data.draw(st.integers(0, len(wire) - 1))
    wire[place] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(bytes(wire[: data.draw(st.integers(0, len(wire)))]))
    _decodes_or_refuses(bytes(wire))


def test_what_the_wire_cannot_say_is_refused() -> None:
    def one(**fields: Any) -> EventBatch:
        event = BlockStored(hashes=(1,), token_ids=array("I", [1]), block_size=1, **fields)
        return EventBatch(ts=0, events=(event,))

    with pytest.raises(ValueError, match="cache_salt"):
        encode_batch(one(parent=5, cache_salt="x"))
    with pytest.raises(ValueError, match="one tier"):
        encode_batch(one(parent=None, medium=Tier.HBM | Tier.DRAM))
    with pytest.raises(ValueError, match="determine"):
        encode_batch(one(parent=None, opaque_from=0))
