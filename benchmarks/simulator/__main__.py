"""The simulator against the papers' figures and this project's goals. The last line is JSON.

Rows of kind `reproduce` say whether the simulator may be believed, rows of kind `goal` what is wanted beyond
the papers. Exits with 1 where a row does not hold; nothing is tuned to one row.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rows import GROUPS, Row
from setups import Traces

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=PUBLISHED, help="folder of the published traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each set-up (default: %(default)s)")
    parser.add_argument("--only", help=f"groups of rows, with commas: {', '.join(GROUPS)}")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(GROUPS)
    if unknown := set(wanted) - set(GROUPS):
        parser.error(f"--only {', '.join(sorted(unknown))}: write some of {', '.join(GROUPS)}")
    if not options.traces.is_dir():
        print(f"{options.traces}: no such folder: name the one of the published traces with --traces")
        return 1

    traces = Traces(options.traces, range(options.seeds))
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(task, description=name)
            rows.extend(GROUPS[name](traces))
            progress.advance(task)
    Console(width=120).print(_table(rows))
    seconds = next((row.ours for row in rows if row.name == "seconds for 12 031 requests"), None)
    document = {
        "rows": [
            {
                "name": r.name,
                "kind": r.kind,
                "expected": r.expected,
                "ours": round(r.ours, 4),
                "holds": r.holds,
            }
            for r in rows
        ],
        "seconds_12031_requests": seconds and round(seconds, 2),
    }
    print(json.dumps(document, ensure_ascii=False))
    return 0 if all(row.holds for row in rows) else 1


def _table(rows: list[Row]) -> Table:
    table = Table()
    table.add_column("row")
    table.add_column("kind")
    table.add_column("expected", justify="right")
    table.add_column("ours", justify="right")
    table.add_column("holds")
    for row in rows:
        shown = f"{row.ours:.3f}" if abs(row.ours) < 10 else f"{row.ours:.1f}"
        table.add_row(row.name, row.kind, row.expected, shown, "yes" if row.holds else "[red]no[/]")
    return table


if __name__ == "__main__":
    sys.exit(main())
