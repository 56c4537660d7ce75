"""`mooncakectl`: the command line of Mooncake for Kubernetes."""

from __future__ import annotations

import sys

from mooncakectl.app import build_app
from mooncakectl.console import CommandError, report_error


def main() -> None:
    """Run the command line; errors of the person at the terminal are told in a line, without a traceback."""
    try:
        build_app()()
    except CommandError as error:
        report_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
