"""The simulator against the papers' figures and this project's goals. The last line is JSON.

Rows of kind `reproduce` say whether the simulator may be believed, rows of kind `goal` what is wanted beyond
the papers; rows of kind `report` are told and not judged. Exits with 1 where a row does not hold; nothing is
tuned to one row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from groups import GROUPS, TOLD
from groups.speed import WITH_ADMISSION
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rows import Row
from setups import Traces, cores

TRACES = ("conversation_trace.jsonl", "synthetic_trace.jsonl")
PUBLISHED = Path(__file__).parents[3] / "shared" / "traces"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=PUBLISHED, help="folder of the published traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each set-up (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes at once (default: %(default)s)")
    parser.add_argument(
        "--only", metavar="PATTERN",
        help=f"groups of rows, with commas, * for any text: {', '.join(GROUPS)} "
        f"(default: all but {', '.join(sorted(TOLD))})",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="keep the rows here too, by groups; other groups stay")
    options = parser.parse_args()
    patterns = options.only.split(",") if options.only else [name for name in GROUPS if name not in TOLD]
    wanted = [name for name in GROUPS if any(fnmatch(name, pattern) for pattern in patterns)]
    if unknown := [p for p in patterns if not any(fnmatch(name, p) for name in GROUPS)]:
        parser.error(f"--only {','.join(unknown)}: write some of {', '.join(GROUPS)}")
    for option in ("seeds", "jobs"):
        if getattr(options, option) < 1:
            parser.error(f"--{option} {getattr(options, option)}: write 1 or more")
    if not options.traces.is_dir():
        print(f"{options.traces}: no such folder: name the one of the published traces with --traces")
        return 1
    if missing := [name for name in TRACES if not (options.traces / name).is_file()]:
        print(
            f"{options.traces}: {' and '.join(missing)} not there: name the folder of the published traces "
            "with --traces"
        )
        return 1

    rows = _run(wanted, options.traces, options.seeds, options.jobs, options.json)
    Console(width=140).print(_table([row for group in rows.values() for row in group]))
    document = _document(rows)
    print(json.dumps(document, ensure_ascii=False))
    return 0 if all(row["holds"] for row in document["rows"]) else 1


def _run(
    wanted: Sequence[str], folder: Path, seeds: int, jobs: int, keep: Path | None
) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        runs = 0

        def ran() -> None:
            nonlocal runs
            runs += 1
            progress.update(task, description=f"{name}, {runs} runs")

        traces = Traces(folder, range(seeds), jobs, ran)
        try:
            for name in wanted:
                progress.update(task, description=name)
                began_s = time.monotonic()
                rows[name] = list(GROUPS[name](traces))
                progress.log(f"{name}: {time.monotonic() - began_s:.0f} s")
                if keep is not None:
                    _keep(keep, {name: rows[name]}, seeds)
                traces.forget()
                progress.advance(task)
        finally:
            traces.close()
    return rows


def _document(groups: dict[str, list[Row]]) -> dict[str, Any]:
    rows = [row for group in groups.values() for row in group]
    seconds = next((row.ours for row in rows if row.name == WITH_ADMISSION), None)
    return {
        "rows": [row.document() for row in rows if row.kind != "report"],
        "reported": [row.document() for row in rows if row.kind == "report"],
        "seconds_12031_requests": seconds and round(seconds, 2),
    }


def _keep(file: Path, groups: dict[str, list[Row]], seeds: int) -> None:
    """Write rows down beside those of groups that were not run this time."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    for name, rows in groups.items():
        kept[name] = {"seeds": seeds, "rows": [row.document() for row in rows]}
    ordered = {name: kept[name] for name in GROUPS if name in kept}
    file.write_text(json.dumps(ordered, ensure_ascii=False, indent=1) + "\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    for name, justify in (("row", "left"), ("kind", "left"), ("expected", "right")):
        table.add_column(name, justify=justify)
    for name in ("ours", "range", "holds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        span = "" if row.spread is None else f"{shown(row.spread[0])} – {shown(row.spread[1])}"
        holds = "" if row.kind == "report" else "yes" if row.holds else "[red]no[/]"
        table.add_row(row.name, row.kind, row.expected, shown(row.ours), span, holds)
    return table


def shown(value: float) -> str:
    """As people read it."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
