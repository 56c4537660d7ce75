"""Bearer keys: who asks, and with which priority.

Key files come from mounted Secrets and are read again when they change.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from mooncake_core.config.base import ConfigError
from mooncake_scheduler.gateway.errors import ErrorAnswer

_log = structlog.get_logger(__name__)

PRIORITY_HEADER = b"x-mooncake-priority"
_PRIORITY: Final = re.compile(rb"[+-]?[0-9]{1,9}")


class Caller(NamedTuple):
    """Who sent a request."""

    tenant: str = "default"
    priority: int = 0


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    priority: int = 0
    weight: float = 1.0


class _Entry(NamedTuple):
    tenant: str
    digest: bytes
    priority: int


_KEYS = msgspec.json.Decoder(dict[str, str | _Key])


class WatchedFile:
    """A file that is read again when it changes.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """Whether it has changed since last asked.

        Raises:
            ConfigError: it cannot be looked at.
        """
        try:
            stat = self.path.stat()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        # Mounted Secrets swap a symbolic link, so size and time alone could stay the same.
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True

    def read(self) -> bytes:
        """Its content.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error


class ApiKeys:
    """The keys of the serving port; without a file everybody is the tenant `default`.

    Args:
        path: JSON object {name: key} or {name: {"key", "priority", "weight"}}; None = no authentication.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else WatchedFile(path)
        self._entries: dict[bytes, _Entry] = {}
        self.weights: Mapping[str, float] = {}
        """What each tenant is entitled to, relative to the others."""
        if self._file is not None:
            self._file.changed()
            self._take(self._file)

    def refresh(self) -> bool:
        """Read the file again if it changed; a file that cannot be used is reported and the old keys stay."""
        if self._file is None:
            return False
        try:
            if not self._file.changed():
                return False
            self._take(self._file)
        except ConfigError as error:
            _log.error("the changed keys file is not used", error=str(error))
            return False
        _log.info("keys read again", keys=len(self._entries))
        return True

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who sent a request with these headers.

        The priority is the key's own, or a lower one that the client asks for.

        Raises:
            ErrorAnswer: 401 without a valid key; 400 for a priority that is no number.
        """
        tenant, allowed = "default", 0
        if self._file is not None:
            entry = self._entry(headers.get(b"authorization", b""))
            tenant, allowed = entry.tenant, entry.priority
        asked = headers.get(PRIORITY_HEADER)
        if asked is None:
            return Caller(tenant, allowed)
        if _PRIORITY.fullmatch(asked) is None:
            raise ErrorAnswer(400, "X-Mooncake-Priority: a whole number of at most 9 digits is expected")
        return Caller(tenant, min(allowed, int(asked)))

    def _entry(self, authorization: bytes) -> _Entry:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            # Digests are compared: how long that takes tells nothing about the keys.
            digest = _digest(key.strip())
            entry = self._entries.get(digest)
            if entry is not None and hmac.compare_digest(entry.digest, digest):
                return entry
        raise ErrorAnswer(
            401, "a valid key is needed: send the header Authorization: Bearer <key>",
            "authentication_error", "invalid_api_key", challenge=True,
        )  # fmt: skip

    def _take(self, file: WatchedFile) -> None:
        try:
            written = _KEYS.decode(file.read())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file.path}: {error}") from None
        entries: dict[bytes, _Entry] = {}
        weights = {}
        for name, value in written.items():
            key = _Key(value) if isinstance(value, str) else value
            if not key.key.strip():
                raise ConfigError(f"{file.path}: {name}: the key is empty")
            if key.weight <= 0:
                raise ConfigError(f"{file.path}: {name}: its weight has to be above 0")
            digest = _digest(key.key.strip().encode())
            if digest in entries:
                raise ConfigError(f"{file.path}: {name} and {entries[digest].tenant} have the same key")
            entries[digest] = _Entry(name, digest, key.priority)
            weights[name] = key.weight
        self._entries, self.weights = entries, weights


class AdminToken:
    """The token of the admin port; without a file it is open.

    Args:
        path: file with the token; None = no authentication.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else WatchedFile(path)
        self._digest = b""
        if self._file is not None:
            self._file.changed()
            self._take(self._file)

    def refresh(self) -> None:
        """Read the file again if it changed."""
        if self._file is None:
            return
        try:
            if self._file.changed():
                self._take(self._file)
        except ConfigError as error:
            _log.error("the changed token file is not used", error=str(error))

    def admits(self, authorization: bytes) -> bool:
        """Whether a request with this Authorization header may come in."""
        if self._file is None:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self._digest)

    def _take(self, file: WatchedFile) -> None:
        token = file.read().strip()
        if not token:
            raise ConfigError(f"{file.path}: the token is empty")
        self._digest = _digest(token)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
