"""Names of blocks in the store, as vLLM writes them."""

import pytest

from mooncake_core.store_keys import store_key


@pytest.mark.parametrize("model", ["/models/llama3-70b/", "meta/llama3-70b", "llama3-70b"])
def test_the_last_part_of_where_the_model_lies_begins_the_name(model: str) -> None:
    assert store_key(model, b"\xab\xcd") == "llama3-70b@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@abcd"
