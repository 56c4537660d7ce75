"""How a KV block is called in the Mooncake store."""

from __future__ import annotations


def store_key(model: str, block_hash: bytes) -> str:
    """The name under which vLLM's `MooncakeStoreConnector` puts a block.

    Args:
        model: path or name under which the engine has loaded its model; its last part is in the name.
        block_hash: the engine's whole hash of the block and all before it.

    Source: vLLM 0.32, `kv_connector/v1/mooncake/store/`; one rank, one group of layers.
    """
    name = model.rstrip("/").rpartition("/")[2]
    return f"{name}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{block_hash.hex()}"
