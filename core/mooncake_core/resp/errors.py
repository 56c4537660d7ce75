"""What may come instead of a reply."""

from __future__ import annotations


class ReplyError(Exception):
    """Redis answered with an error; the message is Redis' own and starts with its code (`WRONGTYPE …`)."""

    @property
    def code(self) -> str:
        """First word of the error."""
        return str(self).partition(" ")[0]


class UnavailableError(ReplyError, ConnectionError):
    """Redis is there but cannot serve now: loading, full, busy, or no longer the primary."""


class DeadlineError(ConnectionError):
    """The reply did not come within the call's time. Whether the command was carried out is not known."""
