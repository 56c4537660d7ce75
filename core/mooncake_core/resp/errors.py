"""What may come instead of a reply."""

from __future__ import annotations

import re

_DEMOTED_CODES = frozenset({"READONLY", "MASTERDOWN"})
_UNAVAILABLE_CODES = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MISCONF", "NOREPLICAS", "OOM", "TRYAGAIN"} | _DEMOTED_CODES
)
_INSIDE_SCRIPT = re.compile(r" -([A-Z]+) ")
"""Before Redis 7 the code of a command that failed in a script stands behind the script's own `ERR`."""


class ReplyError(Exception):
    """Redis answered with an error; the message is Redis' own and starts with its code (`WRONGTYPE …`)."""

    @property
    def code(self) -> str:
        """First word of the error."""
        return str(self).partition(" ")[0]


class UnavailableError(ReplyError, ConnectionError):
    """Redis is there but cannot serve now: loading, full, busy, unable to save, or short of replicas."""


class DemotedError(UnavailableError):
    """This Redis is not the primary, or not any more: another is, to which a new connection may lead."""


class DeadlineError(ConnectionError):
    """The reply did not come within the call's time. Whether the command was carried out is not known."""


def reply_error(text: str) -> ReplyError:
    """The error that an error reply stands for."""
    codes = {text.partition(" ")[0], *_INSIDE_SCRIPT.findall(text)}
    if codes & _DEMOTED_CODES:
        return DemotedError(text)
    if codes & _UNAVAILABLE_CODES:
        return UnavailableError(text)
    return ReplyError(text)
