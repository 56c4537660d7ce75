import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.blocks import block_keys, chain, domain_seed, local_hashes

NUMBERS = json.loads((Path(__file__).parent / "dynamo_1_6_1.json").read_text())


def _name(case: dict[str, Any]) -> str:
    return f"{case['tokens']}-{case['block_size']}-{case['lora_name']}-{case['cache_salt']}"


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=_name)
def test_local_hashes_and_keys_are_those_of_dynamo(case: dict[str, Any]) -> None:
    tokens = NUMBERS["sequences"][case["tokens"]]
    seed = domain_seed(case["lora_name"], case["cache_salt"])

    assert local_hashes(tokens, case["block_size"], seed) == case["local"]
    assert chain(None, case["local"]).tolist() == case["keys"]
    keys = block_keys(
        array("I", tokens), case["block_size"], lora_name=case["lora_name"], cache_salt=case["cache_salt"]
    )
    assert keys.tolist() == case["keys"]


def test_the_numbers_cover_every_block_size_and_every_kind_of_domain() -> None:
    told = {
        (case["block_size"], bool(case["lora_name"]), bool(case["cache_salt"]))
        for case in NUMBERS["cases"]
        if case["keys"]
    }
    assert told >= {(size, lora, salt) for size in (1, 16, 32, 512) for lora in (0, 1) for salt in (0, 1)}
