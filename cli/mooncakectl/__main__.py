"""`mooncakectl`: the command line of Mooncake for Kubernetes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; errors of the person at the terminal are told in a line, without a traceback.

    Exit codes: 0 = done, 1 = what is told on stderr, 2 = wrong use, 130 = interrupted.
    """
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    # Imported here: Ctrl-C may come before everything is there.
    from mooncake_core.open_files import allow_many_open_files
    from mooncakectl.app import build_app
    from mooncakectl.console import CommandError, report_error

    allow_many_open_files()
    try:
        build_app()()
    except CommandError as error:
        report_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # A full disk, a file that may not be read: nothing that a traceback would explain.
        place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        report_error(f"{place}{error.strerror or error}")
        _forget_unwritten()
        sys.exit(1)


def _forget_unwritten() -> None:
    """What could not be written to stdout is not tried again, and complained of, when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
