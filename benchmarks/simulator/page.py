"""docs/evaluation.md from the rows of bench-sim, the text around them, and the reasons of those that fail.

    python -P benchmarks/simulator/page.py            writes it from found.json
    python -P benchmarks/simulator/page.py --check    exits with 1 where it is not what would be written

`evaluation.md` beside this file is the text: `{{rows GROUP}}` stands for a table, `{{summary}}` for how many
rows hold, `{{missed}}` for those that do not, `{{live}}` for what bench-policies found (live.json); groups
without a place come last. `why.toml` says why a row does not hold, by patterns of row names.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOUND = HERE / "found.json"
LIVE = HERE / "live.json"
PAGE = HERE.parents[1] / "docs" / "evaluation.md"
_UNEXPLAINED = "Not explained yet."

RowDocument = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say whether it is up to date")
    options = parser.parse_args()
    text = page(
        (HERE / "evaluation.md").read_text(encoding="utf-8"),
        json.loads(FOUND.read_text(encoding="utf-8")),
        tomllib.loads((HERE / "why.toml").read_text(encoding="utf-8")),
        json.loads(LIVE.read_text(encoding="utf-8"))["answers"],
    )
    if options.check:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.name} is not what its rows and text make: run python -P {HERE.name}/page.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: written")
    return 0


def page(
    template: str, found: Mapping[str, Any], why: Mapping[str, str], live: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The whole page.

    Args:
        template: the text with its places for tables.
        found: for each group its rows, and of how many seeds they are.
        why: reasons by patterns of row names.
        live: what bench-policies found, policy by policy.
    """
    left = set(found)

    def filled(place: re.Match[str]) -> str:
        what, _, group = place[1].strip().partition(" ")
        if what == "summary":
            return _summary(found)
        if what == "live":
            return _live(live)
        if what == "missed":
            return _missed(found, why)
        if group not in found:
            return "*Not run for this page.*"
        left.discard(group)
        return _table(found[group]["rows"], found[group]["seeds"], why)

    text = re.sub(r"\{\{(.*?)\}\}", filled, template)
    for group in [name for name in found if name in left]:
        rows = _table(found[group]["rows"], found[group]["seeds"], why)
        text += f"\n## {group.replace('-', ' ').capitalize()}\n\n{rows}\n"
    return text


def _table(rows: Sequence[RowDocument], seeds: int, why: Mapping[str, str]) -> str:
    lines = ["| row | expected | ours | range | difference | holds |", "|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {row['name']} | {row['expected']} | {_number(row['ours'])} | {_range(row)} | {_difference(row)} "
        f"| {_holds(row)} |"
        for row in rows
    ]
    setups = list(dict.fromkeys(row["setup"] for row in rows if row["setup"]))
    runs = f"medians of {seeds} seeds" if seeds > 1 else "one seed"
    lines += ["", f"Set-up ({runs}, ties at random): {'; or '.join(setups)}." if setups else runs]
    reasons = _reasons([row for row in rows if _failed(row)], why)
    if reasons:
        lines += ["", "Why not:", ""]
        lines += [
            f"- {'; '.join(each['name'] for each in missed)}: {said}" for said, missed in reasons.items()
        ]
    return "\n".join(lines)


def _live(answers: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| workload | policy | mean TTFT live | simulated | hits live | simulated |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each['workload']} | {each['policy']} | {each['live_ttft_s']:.2f} s | "
        f"{each['simulated_ttft_s']:.2f} s | {each['live_hits']:.3f} | {each['simulated_hits']:.3f} |"
        for each in answers
    ]
    return "\n".join(lines)


def _failed(row: RowDocument) -> bool:
    return row["kind"] != "report" and not row["holds"]


def _holds(row: RowDocument) -> str:
    if row["kind"] == "report":
        return "told"
    return ("yes" if row["holds"] else "**no**") + (", a goal" if row["kind"] == "goal" else "")


def _why(row: RowDocument, why: Mapping[str, str]) -> str:
    return next((said for pattern, said in why.items() if fnmatchcase(row["name"], pattern)), _UNEXPLAINED)


def _difference(row: RowDocument) -> str:
    """Of ours from the number that is expected, in percent of it."""
    number = re.search(r"(?<![A-Za-z\d])\d+(?:[ ,]\d{3})*(?:\.\d+)?", row["expected"])
    if row["kind"] == "report" or number is None:
        return ""
    expected = float(number[0].replace(" ", "").replace(",", ""))
    return f"{100 * (row['ours'] / expected - 1):+.1f} %" if expected else f"{row['ours']:+.3g}"


def _range(row: RowDocument) -> str:
    span = row["range"]
    if span is None or span[0] == span[1]:
        return ""
    return f"{_number(span[0])} – {_number(span[1])}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _summary(found: Mapping[str, Any]) -> str:
    lines = ["| | rows | hold |", "|---|---:|---:|"]
    rows = [row for group in found.values() for row in group["rows"]]
    for kind, said in (("reproduce", "figures of the papers"), ("goal", "goals beyond them")):
        judged = [row for row in rows if row["kind"] == kind]
        lines.append(f"| {said} | {len(judged)} | {sum(row['holds'] for row in judged)} |")
    return "\n".join(lines)


def _missed(found: Mapping[str, Any], why: Mapping[str, str]) -> str:
    rows = [row for group in found.values() for row in group["rows"] if _failed(row)]
    if not rows:
        return "Every row holds."
    lines = []
    for said, missed in _reasons(rows, why).items():
        told = [
            f"{row['name']}: {_number(row['ours'])} where {row['expected']} was expected" for row in missed
        ]
        lines.append(f"- {'; '.join(told)}. {said}")
    return "\n".join(lines)


def _reasons(rows: Sequence[RowDocument], why: Mapping[str, str]) -> dict[str, list[RowDocument]]:
    """Rows by why they do not hold: what is one reason is told once."""
    found: dict[str, list[RowDocument]] = {}
    for row in rows:
        found.setdefault(_why(row, why), []).append(row)
    return found


if __name__ == "__main__":
    sys.exit(main())
