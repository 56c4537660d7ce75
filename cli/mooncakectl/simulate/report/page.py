"""The page around the plots: text, tables and colours, in one file without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from mooncakectl.console import in_seconds
from mooncakectl.simulate.naming import common, set_up, varying
from mooncakectl.simulate.report.plots import Plot, plots
from mooncakectl.simulate.report.svg import COLOURS
from mooncakectl.simulate.runs import Answer


def html(answers: Sequence[Answer], trace: str, seeds: int, made: str) -> str:
    """The whole report.

    Args:
        answers: the runs, at least one.
        trace: name of the trace.
        seeds: how many runs each figure is a median of.
        made: how it was made: what somebody types to make it again.
    """
    drawn = _drawn(answers)
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    target = answers[0].question.spec
    slo = f"SLO: TTFT {in_seconds(target.ttft_target_s)}, TBT {in_seconds(target.tbt_target_s)}"
    runs = f"figures are medians of {seeds} seeds, curves are of the first" if seeds > 1 else "one seed"
    facts = [each for each in (common(answers), slo, runs) if each]
    sections = "".join(_section(plot) for plot in plots(answers, drawn))
    left_out = (
        f"<p>Curves are drawn of {len(drawn)} runs, those with the highest goodput; the table has all "
        f"{len(answers)}.</p>"
        if len(drawn) < len(answers)
        else ""
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(trace)} · mooncakectl simulate</title><style>{style}</style></head><body>"
        f'<a class="skip" href="#runs">Skip to the table of all runs</a>'
        f"<header><h1>{escape(trace)}</h1><p>{escape(' · '.join(facts))}</p></header>"
        f'<main><section id="runs"><h2>All runs</h2>{_runs(answers)}{left_out}</section>'
        f"{sections}</main>"
        f"<footer><p>Made by</p><pre><code>{escape(made)}</code></pre></footer></body></html>\n"
    )


def _drawn(answers: Sequence[Answer]) -> list[int]:
    """Those whose curves are drawn, as many as can be told apart; in the order of the table."""
    best = sorted(range(len(answers)), key=lambda at: -(answers[at].figures["goodput"] or 0.0))
    return sorted(best[:COLOURS])


def _section(plot: Plot) -> str:
    title = escape(plot.title)
    shape = "bar" if "<rect" in plot.drawings[0][1] else "line"
    legend = "".join(f"<li>{_key(at, shape)}{escape(name)}</li>" for at, name in enumerate(plot.legend))
    figures = "".join(
        f"<figure>{drawing}" + (f"<figcaption>{escape(name)}</figcaption>" if name else "") + "</figure>"
        for name, drawing in plot.drawings
    )
    many = " many" if len(plot.drawings) > 1 else ""
    numbers = _table(plot.head, plot.rows, plot.title)
    return (
        f"<section><h2>{title}</h2><p>{escape(plot.text)}</p><ul class=legend>{legend}</ul>"
        f'<div class="plots{many}">{figures}</div>'
        f"<details><summary>{title} in numbers</summary>{numbers}</details></section>"
    )


def _key(at: int, shape: str) -> str:
    colour = at % COLOURS
    drawn = (
        f'<rect class="bar s{colour}" width="28" height="10"/>'
        if shape == "bar"
        else f'<path class="line s{colour} d{colour}" d="M0 5H28"/>'
    )
    return f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true">{drawn}</svg>'


def _runs(answers: Sequence[Answer]) -> str:
    # What they have in common stands above.
    varies = varying(answers) or ["P+D"]
    head = [
        *varies, "inside the SLO", "of tokens", "refused", "cut off", "prefills thrown away", "hit rate",
        "TTFT mean", "P90", "P99", "TBT mean", "P90", "prefill busy", "decode busy",
    ]  # fmt: skip
    return _table(head, [_run(answer, varies) for answer in answers], "All runs", first=len(varies))


def _run(answer: Answer, varies: Sequence[str]) -> list[str]:
    figures = answer.figures
    times = [in_seconds(figures[name]) for name in _TIMES]
    busy = [f"{figures[f'{stage}_utilisation'] or 0:.0%}" for stage in ("prefill", "decode")]
    return [
        *(set_up(answer.question)[name] for name in varies),
        f"{figures['goodput'] or 0:.1%}",
        f"{figures['token_goodput'] or 0:.1%}",
        f"{figures['refused'] or 0:,.0f} of {figures['requests'] or 0:,.0f}",
        f"{figures['failed'] or 0:,.0f}",
        f"{figures['wasted_prefills'] or 0:,.0f}",
        f"{figures['token_hit_rate'] or 0:.3f}",
        *times,
        *busy,
    ]


_TIMES = ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "tbt_mean_s", "tbt_p90_s")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str, first: int = 1) -> str:
    """A table; its first columns say what the row is about."""
    heads = "".join(
        f'<th scope="col"{" class=about" if at < first else ""}>{escape(each)}</th>'
        for at, each in enumerate(head)
    )
    body = []
    for row in rows:
        cells = [
            f'<th scope="row">{escape(cell)}</th>' if at < first else f"<td>{escape(cell)}</td>"
            for at, cell in enumerate(row)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    # It may be wider than the page: who has no mouse must be able to scroll it.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}, table"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
