"""What was tried, as a table that says why the one was chosen."""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich.table import Table

from mooncakectl.plan.search import Size
from mooncakectl.plan.tries import Try


def tries_table(
    tries: Sequence[Try], chosen: Size | None, title: str, unit: str, forbidden: Container[Size] = ()
) -> Table:
    """A row for each size that was simulated, the cheapest first.

    Args:
        tries: what was simulated.
        chosen: the size that was chosen, if any.
        title: of the table.
        unit: of the prices.
        forbidden: sizes that the manifest's own rules do not allow.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("P+D", no_wrap=True)
    for name in (unit, "TTFT kept", "TBT kept", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for each in sorted(tries, key=lambda one: (one.price, one.size)):
        style = "bold" if each.size == chosen else ""
        table.add_row(
            f"{each.size.prefill}+{each.size.decode}",
            f"{each.price:,.6g}",
            f"{each.kept.ttft:.1%}",
            f"{each.kept.tbt:.1%}",
            f"{each.kept.refused:.1%}",
            _verdict(each, chosen, forbidden),
            style=style,
        )
    return table


def _verdict(each: Try, chosen: Size | None, forbidden: Container[Size]) -> str:
    if each.size == chosen:
        return "cheapest that keeps the SLO"
    if each.size in forbidden:
        return "keeps it, is not allowed"
    return each.missed or "keeps it too"
