"""`python -m mooncake_core.api.crds --write DIR | --check DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mooncake_core.api.crds.files import differences, write


def main(argv: list[str] | None = None) -> int:
    """Write or compare; 1 when files differ."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_core.api.crds", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="DIR", help="write the definitions there")
    action.add_argument("--check", type=Path, metavar="DIR", help="compare the files there with the models")
    arguments = parser.parse_args(argv)
    if arguments.write is not None:
        for path in write(arguments.write):
            print(path)
        return 0
    found = differences(arguments.check)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("run `make crds` and commit the result", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
