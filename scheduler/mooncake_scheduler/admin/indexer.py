"""The indexer calls of Mooncake's Conductor (RFC 1403), in its own dialect and in Dynamo's.

They ask the same question under different names. Mooncake names the model `model` and rolling hashes
`seq_hashes` (`block_hash` in early drafts), and answers by tenant with upper-case tiers; Dynamo names it
`model_name`, sends the blocks' local hashes as `block_hashes`, and answers with lower-case tiers. In both,
counts are tokens and cumulative: a slower tier counts what the faster ones hold too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field

from mooncake_core.blocks import block_keys, chain
from mooncake_core.index import Depth
from mooncake_scheduler.gateway.services import Services

U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Query(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    model_name: str | None = None
    lora_name: str | None = None
    tenant_id: str = "default"
    instance_id: str | int | None = None
    block_size: int | None = Field(default=None, ge=1)
    cache_salt: str | None = None

    @property
    def is_dynamo(self) -> bool:
        """Whether it speaks Dynamo's dialect."""
        return self.model is None and self.model_name is not None


class TokenQuery(_Query):
    """A prompt by its token ids."""

    token_ids: list[U32]


class HashQuery(_Query):
    """A prompt by its blocks' hashes: rolling ones, or local ones as `block_hashes`."""

    seq_hashes: list[U64] | None = None
    block_hash: list[U64] | None = None
    block_hashes: list[U64] | None = None


async def answer_tokens(asked: TokenQuery, services: Services) -> dict[str, Any]:
    """Hits of a prompt by its token ids."""
    size = _check(asked, services)
    keys = block_keys(asked.token_ids, size, lora_name=asked.lora_name, cache_salt=asked.cache_salt)
    return await _answer(asked, keys, size, services)


async def answer_hashes(asked: HashQuery, services: Services) -> dict[str, Any]:
    """Hits of a prompt by its blocks' hashes."""
    size = _check(asked, services)
    rolling = asked.seq_hashes if asked.seq_hashes is not None else asked.block_hash
    if rolling is None and asked.block_hashes is None:
        raise HTTPException(422, "seq_hashes (rolling) or block_hashes (local to each block) are required")
    keys: Sequence[int] = rolling if rolling is not None else chain(None, asked.block_hashes or [])
    return await _answer(asked, keys, size, services)


def _check(asked: _Query, services: Services) -> int:
    """The block size; what is not served here is an error, so that a wrong name is no silent miss."""
    served = services.config.model
    named = asked.model if asked.model is not None else asked.model_name
    if named is not None and named != served:
        raise HTTPException(404, f"model {named!r} is not served here: ask for {served!r}")
    size = services.roster.block_size_tokens
    if asked.block_size is not None and asked.block_size != size:
        raise HTTPException(422, f"block_size {asked.block_size}: this index has blocks of {size} tokens")
    return size


async def _answer(asked: _Query, keys: Sequence[int], size: int, services: Services) -> dict[str, Any]:
    depths: Mapping[str, Depth] = await services.residency.match(keys)
    known = [*services.roster.members, *services.roster.stores]
    if asked.instance_id is not None:
        known = [instance_id for instance_id in known if instance_id == str(asked.instance_id)]
    nothing = Depth(0, 0, 0)
    hits = {i: _hit(depths.get(i, nothing), size, dynamo=asked.is_dynamo) for i in known}
    return {"instances": hits} if asked.is_dynamo else {asked.tenant_id: hits}


def _hit(depth: Depth, size: int, *, dynamo: bool) -> dict[str, Any]:
    hbm, dram, ssd = (blocks * size for blocks in depth)
    names = ("gpu", "cpu", "disk", "dp") if dynamo else ("GPU", "CPU", "DISK", "DP")
    # Engines are registered as a whole: their ranks share one line.
    return {"longest_matched": ssd, **dict(zip(names, (hbm, dram, ssd, {"0": hbm}), strict=True))}
