"""What engines of several versions really send, byte for byte in their encodings."""

from array import array
from typing import Any

import msgspec
import pytest

from mooncake_core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    decode_batch,
    low64,
)
from mooncake_core.index.contract import Tier


def payload(*events: Any, ts: Any = 1795973772.645, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": [1, 2]}
    return event | {"block_size": 2} | fields


def only(data: bytes) -> Any:
    (event,) = decode_batch(data).events
    return event


def test_the_map_form_of_vllm_0_32() -> None:
    batch = decode_batch(
        payload(
            {
                "type": "BlockStored",
                "block_hashes": [16946669245775850534, 9125831974761277293],
                "parent_block_hash": None,
                "token_ids": list(range(64)),
                "block_size": 32,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None, None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {
                "type": "BlockRemoved",
                "block_hashes": [12501472473374539907],
                "medium": "GPU",
                "group_idx": 0,
            },
            {"type": "AllBlocksCleared"},
        )
    )
    first, second, third = batch.events
    assert batch.ts == 1795973772.645
    assert batch.dp_rank == 0
    assert first == BlockStored(
        hashes=(16946669245775850534, 9125831974761277293),
        parent=None,
        token_ids=array("I", range(64)),
        block_size=32,
    )
    assert second == BlockRemoved(hashes=(12501472473374539907,))
    assert third == AllBlocksCleared()


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU"],  # 0.12
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, [None]],  # 0.17
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, [None], 0],  # 0.21
        ["BlockStored", [7], None, [1, 2], 2],  # as short as it gets
        [
            "BlockStored",
            [7],
            None,
            [1, 2],
            2,
            None,
            None,
            None,
            None,
            0,
            "full_attention",
            None,
            "LOCAL",
            None,
            5,
        ],
        {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2},
    ],
)
def test_the_array_forms_of_older_versions_mean_the_same(event: Any) -> None:
    assert only(payload(event)) == BlockStored(
        hashes=(7,), parent=None, token_ids=array("I", [1, 2]), block_size=2
    )


def test_array_forms_of_removal_and_clearing() -> None:
    batch = decode_batch(payload(["BlockRemoved", [7, 8], "CPU"], ["AllBlocksCleared"], rank=None))
    assert batch.events == (BlockRemoved(hashes=(7, 8), medium=Tier.DRAM), AllBlocksCleared())
    assert batch.dp_rank is None


def test_a_batch_without_its_rank_is_of_no_rank() -> None:
    assert decode_batch(msgspec.msgpack.encode([1, []])).dp_rank is None


def test_hashes_may_be_signed_unsigned_or_digests() -> None:
    digest = bytes(range(32))
    event = only(payload(stored(block_hashes=[-1, digest], token_ids=[1, 2, 3, 4], parent_block_hash=-2)))
    assert event.hashes == (2**64 - 1, digest)
    assert event.parent == 2**64 - 2
    assert low64(digest) == int.from_bytes(digest[24:], "big")
    assert low64(5) == 5


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.HBM),
        ("GPU", Tier.HBM),
        ("CPU", Tier.DRAM),
        ("cpu", Tier.DRAM),
        ("CPU_PINNED", Tier.DRAM),
        ("STORAGE", Tier.SSD),
        ("DISK", Tier.SSD),
    ],
)
def test_each_medium_is_a_tier(medium: str | None, tier: Tier) -> None:
    assert only(payload(stored(medium=medium))).medium is tier


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_every_kind_of_full_attention_counts(kind: str | None) -> None:
    assert only(payload(stored(kv_cache_spec_kind=kind, group_idx=0))).hashes == (11,)


def test_other_cache_groups_are_skipped_and_counted() -> None:
    batch = decode_batch(
        payload(
            stored(group_idx=1),
            stored(group_idx=0, kv_cache_spec_kind="sliding_window"),
            {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2},
            stored(),
        )
    )
    assert len(batch.events) == 1
    assert batch.other_groups == 3


def test_unknown_types_and_media_are_skipped_and_named() -> None:
    batch = decode_batch(
        payload({"type": "BlockMigrated", "x": 1}, ["Future"], stored(medium="TAPE"), stored())
    )
    assert len(batch.events) == 1
    assert batch.unknown == ("BlockMigrated", "Future", "medium TAPE")


def test_the_salt_is_that_of_the_first_block_and_the_lora_is_not_it() -> None:
    event = only(payload(stored(lora_name="sql", extra_keys=[["sql", "tenant-a"]])))
    assert (event.lora_name, event.cache_salt, event.opaque_from) == ("sql", "tenant-a", None)
    same = only(payload(stored(lora_name="sql", extra_keys=[["sql", "sql"]])))
    assert same.cache_salt == "sql"
    sglang = only(payload(stored(cache_salt="tenant-b", lora_name="")))
    assert (sglang.lora_name, sglang.cache_salt) == (None, "tenant-b")
    positional = only(payload(["BlockStored", [7], None, [1, 2], 2, None, "GPU", {"cache_salt": "tenant-c"}]))
    assert (positional.lora_name, positional.cache_salt) == (None, "tenant-c")


@pytest.mark.parametrize(
    ("fields", "opaque_from"),
    [
        ({"extra_keys": [None, [["image-1", 0]]]}, 1),  # an image in the second block
        ({"extra_keys": [["salt", "a" * 64], None]}, 0),  # salt and an image key of an old version
        ({"parent_block_hash": 3, "extra_keys": [None, ["a" * 64]]}, 1),
        ({"extra_keys": [[b"embeddings"], None]}, 0),
        ({"lora_id": 4}, 0),  # an adapter whose name is not told
        ({"lora_id": 4, "lora_name": "sql", "extra_keys": [["sql"], ["sql"]]}, None),
        ({"extra_keys": [["salt"], None]}, None),
    ],
)
def test_blocks_that_tokens_do_not_determine_are_marked(
    fields: dict[str, Any], opaque_from: int | None
) -> None:
    event = only(payload(stored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], **fields)))
    assert event.opaque_from == opaque_from


def test_blocks_elsewhere_say_so() -> None:
    assert only(payload(stored(locality="REMOTE", medium="cpu"))).remote
    assert not only(payload(stored(locality="LOCAL"))).remote


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not MessagePack"),
        (b"\xc1", "not MessagePack"),
        (b"\x91" * 100_000, "not MessagePack"),
        (msgspec.msgpack.encode({"a": 1}), "payload: expected"),
        (msgspec.msgpack.encode([1]), "payload: expected"),
        (payload(ts="now"), "ts: expected"),
        (msgspec.msgpack.encode([1, 5]), "events: expected an array"),
        (payload(rank="0"), "data_parallel_rank"),
        (payload(5), r"events\[0\]: expected a map"),
        (payload([]), r"events\[0\]: expected a map"),
        (payload([5]), r"events\[0\]: type"),
        (payload({"x": 1}), r"events\[0\]: type: expected a string, got nothing"),
        (
            payload(stored(), stored(block_hashes=None)),
            r"events\[1\]: BlockStored.block_hashes: expected an array",
        ),
        (payload(stored(block_hashes=[1.5])), "BlockStored.block_hashes: expected 64-bit ints"),
        (payload(stored(block_hashes=[True])), "BlockStored.block_hashes"),
        (payload(stored(block_hashes=[b""])), "no bytes"),
        (payload(stored(parent_block_hash="x")), "BlockStored.parent_block_hash"),
        (payload(stored(token_ids="ab")), "BlockStored.token_ids"),
        (payload(stored(token_ids=[1, -2])), "unsigned 32-bit"),
        (payload(stored(token_ids=[[1, 2], [2, 3]])), "unsigned 32-bit"),
        (payload(stored(token_ids=[1, 2, 3])), "3 ids for 1 blocks of 2 tokens"),
        (payload(stored(block_size=0)), "BlockStored.block_size"),
        (payload(stored(block_size=None)), "BlockStored.block_size"),
        (payload(stored(medium=3)), "BlockStored.medium"),
        (payload(stored(lora_name=3)), "BlockStored.lora_name"),
        (payload(stored(cache_salt=3)), "BlockStored.cache_salt"),
        (payload(stored(extra_keys=3)), "BlockStored.extra_keys"),
        (payload(stored(extra_keys=[3])), r"BlockStored.extra_keys\[0\]"),
        (payload(stored(group_idx="a")), "BlockStored.group_idx"),
        (payload(stored(kv_cache_spec_kind=1)), "BlockStored.kv_cache_spec_kind"),
        (payload(["BlockRemoved"]), "BlockRemoved.block_hashes: expected an array, got nothing"),
    ],
)
def test_a_malformed_payload_is_refused_with_its_place_and_cause(data: bytes, told: str) -> None:
    with pytest.raises(EventDecodeError, match=told):
        decode_batch(data)
