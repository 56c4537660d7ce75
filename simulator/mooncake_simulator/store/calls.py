"""What clients and nodes say to the simulated master and to each other: msgpack over HTTP.

A real master speaks coro_rpc here; only simulated engines and nodes use this port, so a router cannot tell.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec


class CallFormatError(Exception):
    """A call that cannot be understood; the message names the field."""


class Mount(msgspec.Struct, kw_only=True):
    """Lend a segment."""

    name: str
    client_id: str
    capacity_bytes: int
    ssd_capacity_bytes: int = 0


class Heartbeat(msgspec.Struct, kw_only=True):
    """A node lives."""

    client_id: str


class Promoted(msgspec.Struct, kw_only=True):
    """A node has carried objects from its SSD to its DRAM."""

    client_id: str
    keys: list[str]


class Unmount(msgspec.Struct, kw_only=True):
    """Take a segment back."""

    name: str


class PutStart(msgspec.Struct, kw_only=True):
    """Reserve room."""

    objects: list[tuple[str, int]]
    preferred: str | None = None


class Keys(msgspec.Struct, kw_only=True):
    """Calls that concern keys: put_end, put_revoke, exists, get, lookup, lookup_one, remove."""

    keys: list[str]


class Transfer(msgspec.Struct, kw_only=True):
    """Said to a node: carry so many bytes, answer when they are through."""

    size_bytes: int
    ssd: bool = False


_Call = TypeVar("_Call", bound=msgspec.Struct)


def decode(body: bytes, kind: type[_Call]) -> _Call:
    """Read a call.

    Raises:
        CallFormatError: it is not one of this kind.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise CallFormatError(f"{kind.__name__}: {error}") from error


def encode(value: Any) -> bytes:
    """Write an answer."""
    return msgspec.msgpack.encode(value)
