import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.blocks import block_keys, domain_seed, extend_keys, local_hashes, pack_tokens

tokens_st = st.lists(st.integers(0, 2**32 - 1), max_size=200)
size_st = st.integers(1, 40)
name_st = st.none() | st.text(max_size=8)


@given(tokens_st, size_st)
def test_every_form_of_the_tokens_gives_the_same_keys(tokens: list[int], size: int) -> None:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    keys = block_keys(tokens, size)
    assert keys.typecode == "Q"
    assert len(keys) == len(tokens) // size
    for form in (tuple(tokens), array("I", tokens), array("q", tokens), packed, bytearray(packed)):
        assert block_keys(form, size) == keys
    assert block_keys(memoryview(array("I", tokens)), size) == keys


@given(tokens_st, size_st, st.integers(0, 200), name_st, name_st)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(
    tokens: list[int], size: int, cut: int, lora: str | None, salt: str | None
) -> None:
    keys = block_keys(tokens, size, lora_name=lora, cache_salt=salt)
    head = block_keys(tokens[:cut], size, lora_name=lora, cache_salt=salt)
    assert keys[: len(head)] == head


@given(tokens_st, size_st, st.integers(0, 20), name_st, name_st)
def test_extending_from_any_block_gives_what_hashing_at_once_gives(
    tokens: list[int], size: int, blocks: int, lora: str | None, salt: str | None
) -> None:
    whole = block_keys(tokens, size, lora_name=lora, cache_salt=salt)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else None
    rest = extend_keys(parent, tokens[blocks * size :], size, domain_seed(lora, salt))
    assert whole[:blocks] + rest == whole


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), st.integers(0, 31))
def test_one_other_token_changes_every_key_from_its_block_on_and_none_before(
    tokens: list[int], place: int
) -> None:
    other = list(tokens)
    other[place] = (other[place] + 1) % 2**32
    before, after = block_keys(tokens, 8), block_keys(other, 8)
    block = place // 8
    assert before[:block] == after[:block]
    assert all(one != two for one, two in zip(before[block:], after[block:], strict=True))


@given(name_st, name_st, name_st, name_st)
def test_domains_never_share_keys_unless_they_are_the_same(
    lora: str | None, salt: str | None, other_lora: str | None, other_salt: str | None
) -> None:
    same = (lora or None, salt or None) == (other_lora or None, other_salt or None)
    assert (domain_seed(lora, salt) == domain_seed(other_lora, other_salt)) == same


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_a_token_id_out_of_range_is_a_clear_error(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="unsigned 32-bit"):
        pack_tokens(bad)


def test_broken_bytes_and_block_sizes_are_clear_errors() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        pack_tokens(b"12345")
    with pytest.raises(ValueError, match="block size 0"):
        local_hashes([1, 2], 0)
