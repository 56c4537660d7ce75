"""What simulations said, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from mooncakectl.console import in_seconds
from mooncakectl.simulate.naming import common, set_up, varying
from mooncakectl.simulate.runs import Answer


def answers_table(answers: Sequence[Answer], trace: str, seeds: int) -> Table:
    """A row for each set-up; what they have in common stands in the title."""
    varies = varying(answers)
    runs = f"medians of {seeds} seeds" if seeds > 1 else "1 seed"
    table = Table(
        title=f"{trace} · {common(answers)} · {runs}".replace(" ·  · ", " · "),
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
    )
    for name in varies:
        # Where all does not fit, names are folded: numbers that are cut are wrong ones.
        table.add_column(name, overflow="fold")
    for name in ("goodput", "refused", "hits", "TTFT P90", "mean", "TBT P90", "busy P", "D"):
        table.add_column(name, justify="right", no_wrap=True)
    failed = any(each.figures["failed"] for each in answers)
    if failed:
        table.add_column("failed", justify="right", no_wrap=True)
    best = max([each.figures["goodput"] or 0.0 for each in answers])
    for each in answers:
        figures, shown = each.figures, set_up(each.question)
        goodput = figures["goodput"] or 0.0
        table.add_row(
            *(shown[name] for name in varies),
            Text(f"{goodput:.1%}", "bold" if len(answers) > 1 and goodput == best else ""),
            f"{figures['refused'] or 0:.0f}",
            f"{figures['token_hit_rate'] or 0:.3f}",
            in_seconds(figures["ttft_p90_s"]),
            in_seconds(figures["ttft_mean_s"]),
            in_seconds(figures["tbt_p90_s"]),
            f"{figures['prefill_utilisation'] or 0:.0%}",
            f"{figures['decode_utilisation'] or 0:.0%}",
            *([f"{figures['failed'] or 0:.0f}"] if failed else []),
        )
    return table
