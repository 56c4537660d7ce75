"""Which cluster is meant, when nothing was said."""

from __future__ import annotations

import os
from pathlib import Path

from mooncakectl.console import CommandError
from mooncakectl.local.folders import Folders, state_root
from mooncakectl.local.records import RecordFile, RunRecord, is_up


def running_clusters() -> list[RunRecord]:
    """The local clusters of this user that are up and have announced where they answer."""
    root = state_root(os.environ)
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    found = []
    for name in names:
        folders = Folders.of(name)
        if is_up(folders) and (record := RecordFile(folders).load()) is not None and record.admin_urls:
            found.append(record)
    return found


def admin_urls(given: str | None) -> list[str]:
    """The admin ports to ask: the given one, or those of the local cluster that is up.

    Raises:
        CommandError: nothing was given, and no cluster is up, or more than one.
    """
    if given is not None:
        return [given.rstrip("/")]
    found = running_clusters()
    if not found:
        raise CommandError(
            "no cluster is up on this machine: `mooncakectl up -f FILE`, or name one with --url"
        )
    if len(found) > 1:
        choices = ", ".join(f"{record.cluster} (--url {record.admin_urls[0]})" for record in found)
        raise CommandError(f"several clusters are up: {choices}")
    return found[0].admin_urls


def admin_token() -> str | None:
    """The bearer token for the admin port: `$MOONCAKE_ADMIN_TOKEN`, or the file it names with a leading @."""
    token = os.environ.get("MOONCAKE_ADMIN_TOKEN")
    if token and token.startswith("@"):
        try:
            return Path(token[1:]).read_text().strip()
        except OSError as error:
            raise CommandError(f"MOONCAKE_ADMIN_TOKEN: {token[1:]}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CommandError(f"MOONCAKE_ADMIN_TOKEN: {token[1:]}: not a text file") from error
    return token
