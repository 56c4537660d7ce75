"""Where a Redis listens, from its URL."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

_FORMS = "write redis://[user:password@]host[:port][/db], rediss://… for TLS, or unix:///path[?db=n]"


class Address(NamedTuple):
    """A parsed Redis URL."""

    host: str
    port: int
    path: str
    """Path of a Unix socket; empty for TCP."""
    tls: bool
    db: int
    username: str | None
    password: str | None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL.

        Raises:
            ValueError: the URL is none of the forms that Redis clients agree on; the message says which are.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"redis", "rediss", "unix"}:
            raise ValueError(f"Redis URL with unknown scheme {parts.scheme!r}: {_FORMS}")
        try:
            port = parts.port or 6379
            db = int(parse_qs(parts.query).get("db", ["0"])[0])
            if parts.scheme != "unix" and parts.path.strip("/"):
                db = int(parts.path.strip("/"))
        except ValueError as error:
            raise ValueError(f"Redis URL with a bad number ({error}): {_FORMS}") from None
        if parts.scheme == "unix" and not parts.path:
            raise ValueError(f"Redis URL without a socket path: {_FORMS}")
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=port,
            path=unquote(parts.path) if parts.scheme == "unix" else "",
            tls=parts.scheme == "rediss",
            db=db,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
        )

    def __str__(self) -> str:
        """The place, without credentials: fit for logs and errors."""
        return self.path or f"{self.host}:{self.port}"
