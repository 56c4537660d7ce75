"""Addresses and keys as they are typed, before anything is asked with them."""

from __future__ import annotations

import ssl
from urllib.parse import SplitResult, urlsplit

from mooncakectl.console import CommandError


def checked_url(url: str) -> SplitResult:
    """The parts of what `--url` says.

    Raises:
        CommandError: it is no http or https URL of a host and, if any, a port that there is.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # What cannot be a name on the network fails here, and not in the middle of an exchange.
        (parts.hostname or "").encode("idna")
    except ValueError:
        usable = False
    if not usable or any(char.isspace() for char in url):
        raise CommandError(f"--url {url}: expected something like http://127.0.0.1:8000")
    return parts


def tls_to(parts: SplitResult) -> ssl.SSLContext | None:
    """How to encrypt on the way to a checked URL; None where it is not.

    Whom to trust is the machine's and the environment's to say (SSL_CERT_FILE, SSL_CERT_DIR), also where the
    proxies that the environment names are not asked.
    """
    return ssl.create_default_context() if parts.scheme == "https" else None


def bearer(key: str, source: str) -> dict[str, str]:
    """The header that carries a key.

    Args:
        key: the key or token.
        source: where it was given, for the message.

    Raises:
        CommandError: it has what no header can carry; the key itself is not told.
    """
    if not key.isascii() or not key.isprintable():
        raise CommandError(f"{source}: a key is one line of ASCII: is it the right file or variable?")
    return {"Authorization": f"Bearer {key}"}
