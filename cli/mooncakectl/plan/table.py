"""What was tried, as a table that says why the one was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mooncakectl.plan.search import Size
from mooncakectl.plan.tries import Try


def tries_table(tries: Sequence[Try], chosen: Size | None, title: str, unit: str) -> Table:
    """A row for each size that was simulated, the cheapest first."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("P+D")
    for name in (unit, "TTFT kept", "TBT kept", "refused"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in sorted(tries, key=lambda one: (one.price, one.size)):
        style = "bold" if each.size == chosen else ""
        table.add_row(
            f"{each.size.prefill}+{each.size.decode}",
            f"{each.price:,.6g}",
            f"{each.kept.ttft:.1%}",
            f"{each.kept.tbt:.1%}",
            f"{each.kept.refused:.1%}",
            _verdict(each, chosen),
            style=style,
        )
    return table


def _verdict(each: Try, chosen: Size | None) -> str:
    if each.size == chosen:
        return "cheapest that keeps the SLO"
    return each.missed or "keeps it too"
