"""Which plots a report shows, and of what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncakectl.simulate.curves import Curves
from mooncakectl.simulate.naming import names, set_up, varying
from mooncakectl.simulate.report import axes, svg
from mooncakectl.simulate.runs import Answer


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing, what it shows in words, and its numbers for those who do not see it."""

    title: str
    text: str
    drawings: Sequence[tuple[str, str]]
    """Each with a heading of its own, which may be empty."""
    legend: Sequence[str]
    head: Sequence[str] = field(default_factory=list)
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def plots(answers: Sequence[Answer], drawn: Sequence[int]) -> list[Plot]:
    """All that there is something to show of.

    Args:
        answers: the runs.
        drawn: numbers of those whose curves are drawn, at most as many as there are colours.
    """
    called = names(answers)
    chosen = [(called[number], answers[number]) for number in drawn]
    spec = answers[0].question.spec
    found = [
        _distribution("Time to first token", chosen, lambda c: c.ttft_s, spec.ttft_target_s, whole=True),
        _distribution("Time between tokens", chosen, lambda c: c.tbt_s, spec.tbt_target_s),
        *_sweep(answers),
        _loads(chosen),
        _sources(chosen),
        _replicas(chosen),
        _promotions(chosen),
        _refusals(chosen),
        _errors(chosen),
    ]
    return [plot for plot in found if plot is not None]


def _distribution(
    title: str,
    chosen: Sequence[tuple[str, Answer]],
    values: Callable[[Curves], list[float]],
    target_s: float | None,
    *,
    whole: bool = False,
) -> Plot | None:
    lines, rows = [], []
    for colour, (name, answer) in enumerate(chosen):
        ordered = values(answer.curves)
        if not ordered:
            continue
        top = answer.curves.answered if whole else 1.0
        points = _cumulated(ordered, top)
        lines.append(svg.Line(name, points, colour))
        shares = (0.5, 0.9, 0.99)
        rows.append([name, *(axes.seconds(_at(points, share)) if share <= top else "–" for share in shares)])
    if not lines:
        return None
    every = [x for line in lines for x, _ in line.points] + ([target_s] if target_s else [])
    # Waiting spreads over decades; where it does not, equal steps are easier to read.
    log = max(every) > 30 * max(min(every), 1e-3)
    low, high = axes.wide_log(every) if log else (0.0, max(every) * 1.05)
    x = axes.Axis(low, high, *svg.LARGE.across(), title.lower(), _short_seconds, log)
    y = axes.Axis(0, 1, *svg.LARGE.upwards(), "share of requests", axes.percent)
    marks = [svg.Mark(f"SLO {_short_seconds(target_s)}", target_s)] if target_s else []
    told = (
        "The share of all requests that had their first token by then; a curve that ends below 100 % lacks "
        "those that were refused."
        if whole
        else "The mean of a request's longest tenth of gaps: the share of requests that stayed below."
    )
    drawing = svg.line_plot(f"{title}: cumulated share of requests", lines, x, y, marks)
    legend = [name for name, _ in chosen]
    return Plot(title, told, [("", drawing)], legend, ["run", "P50", "P90", "P99"], rows)


def _cumulated(ordered: Sequence[float], top: float = 1.0) -> list[tuple[float, float]]:
    """Each value with the share of those up to it; from 0 on, so that a single one is a line too."""
    shares = [(each, (at + 1) / len(ordered) * top) for at, each in enumerate(ordered)]
    return [(ordered[0], 0.0), *shares]


def _at(points: Sequence[tuple[float, float]], share: float) -> float:
    return next((x for x, y in points if y >= share - 1e-9), points[-1][0])


def _sweep(answers: Sequence[Answer]) -> list[Plot | None]:
    """Goodput over the number of prefill instances, where several were tried."""
    counts = sorted({answer.question.spec.prefill for answer in answers})
    if len(counts) < 2:
        return []
    lines: dict[str, list[Answer]] = {}
    others = [name for name in varying(answers) if name != "P+D"] or ["policy"]
    for answer in sorted(answers, key=lambda each: each.question.spec.prefill):
        own = set_up(answer.question)
        lines.setdefault(" · ".join(own[name] for name in others), []).append(answer)
    best = sorted(lines, key=lambda name: -max(_figure(each, "goodput") for each in lines[name]))
    # In the order of the table.
    legend = [name for name in lines if name in best[: svg.COLOURS]]
    # With room beside the first and the last.
    ends = counts[0] - 0.3, counts[-1] + 0.3
    x = axes.Axis(*ends, *svg.SMALL.across(), "prefill instances, of the same in all", axes.plain, whole=True)
    drawn = []
    for heading, figure, shown in (
        ("Requests inside the SLO", "goodput", axes.percent),
        ("Mean time to first token", "ttft_mean_s", _short_seconds),
        ("Mean time between tokens", "tbt_mean_s", _short_seconds),
    ):
        top = 1.0 if figure == "goodput" else max(_figure(each, figure) for each in answers) * 1.1 or 1.0
        y = axes.Axis(0, top, *svg.SMALL.upwards(), "", shown)
        curves = [
            svg.Line(
                name, [(a.question.spec.prefill, _figure(a, figure)) for a in lines[name]], at, dots=True
            )
            for at, name in enumerate(legend)
        ]
        drawn.append((heading, svg.line_plot(heading, curves, x, y, frame=svg.SMALL)))
    rows = [_swept(name, answer) for name, row in lines.items() for answer in row]
    told = "The same instances in all, divided otherwise: too few for prefill and prompts queue, too few for "
    told += "decode and tokens come late."
    if len(legend) < len(lines):
        told += f" Drawn are the {len(legend)} of {len(lines)} with the highest goodput."
    head = ["P+D", "run", "inside the SLO", "mean TTFT", "mean TBT"]
    return [Plot("Prefill to decode", told, drawn, legend, head, rows)]


def _swept(name: str, answer: Answer) -> list[str]:
    means = [_short_seconds(answer.figures[each]) for each in ("ttft_mean_s", "tbt_mean_s")]
    return [set_up(answer.question)["P+D"], name, axes.percent(round(_figure(answer, "goodput"), 4)), *means]


def _figure(answer: Answer, name: str) -> float:
    return answer.figures[name] or 0.0


def _loads(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    legend = ["prefill busy", "decode busy", "decode KV memory"]
    drawn, rows = [], []
    for name, answer in chosen:
        load = answer.curves.load
        if load is None or len(load.prefill) < 2:
            continue
        span_s = len(load.prefill) * load.window_s
        unit_s, unit = _unit(span_s)
        x = axes.Axis(0, span_s / unit_s, *svg.SMALL.across(), unit, axes.plain)
        y = axes.Axis(0, 1, *svg.SMALL.upwards(), "", axes.percent)
        each = (load.prefill, load.decode, load.kv)
        lines = [
            svg.Line(part, [((at + 0.5) * load.window_s / unit_s, v) for at, v in enumerate(values)], colour)
            for colour, (part, values) in enumerate(zip(legend, each, strict=True))
        ]
        drawn.append((name, svg.line_plot(f"Load over time, {name}", lines, x, y, frame=svg.SMALL)))
        rows.append([name, *(f"{sum(v) / len(v):.0%} (at most {max(v):.0%})" for v in each)])
    if not drawn:
        return None
    told = "Means over the instances of each stage, while requests came in. Stages that swing against each "
    told += "other waste both."
    return Plot("Load of both stages", told, drawn, legend, ["run", *legend], rows)


def _sources(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    parts = list(dict.fromkeys(part for _, answer in chosen for part in answer.curves.prompt_tokens))
    sizes = []
    for _, answer in chosen:
        tokens = answer.curves.prompt_tokens
        total = sum(tokens.values())
        sizes.append([tokens.get(part, 0) / total if total else 0.0 for part in parts])
    told = "Of the prompt tokens that were prefilled: what was found, and where; the rest was computed."
    return _bars(
        "Where prompts came from",
        told,
        [n for n, _ in chosen],
        parts,
        sizes,
        1.0,
        "share of prompt tokens",
        axes.percent,
    )


def _replicas(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    drawn, rows, legend = [], [], dict[str, None]()
    for name, answer in chosen:
        seen = answer.curves.replicas
        if seen is None or not seen.holders or not seen.every_s:
            continue
        most = answer.question.spec.prefill
        samples = len(next(iter(seen.holders.values())))
        unit_s, unit = _unit(samples * seen.every_s)
        x = axes.Axis(0, samples * seen.every_s / unit_s, *svg.SMALL.across(), unit, axes.plain)
        y = axes.Axis(0, most, *svg.SMALL.upwards(), "instances", axes.plain, whole=True)
        lines = []
        for colour, (rank, counts) in enumerate(seen.holders.items()):
            called = f"block of rank {rank:,}"
            legend[called] = None
            points = [((at + 1) * seen.every_s / unit_s, float(count)) for at, count in enumerate(counts)]
            lines.append(svg.Line(called, points, colour))
            rows.append(
                [name, f"{rank:,}", f"{sum(counts) / samples:.1f}", str(max(counts)), str(counts[-1])]
            )
        drawn.append((name, svg.line_plot(f"Replicas over time, {name}", lines, x, y, frame=svg.SMALL)))
    if not drawn:
        return None
    told = "Prefill instances that hold a popular block; the rank is that of how often the trace asks for it."
    head = ["run", "rank", "mean", "most", "at the end"]
    return Plot("Replicas of hot blocks", told, drawn, list(legend), head, rows)


def _unit(span_s: float) -> tuple[float, str]:
    """How time is counted on an axis that long."""
    return (60.0, "min since the first request") if span_s >= 300 else (1.0, "s since the first request")


def _promotions(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    told = (
        "Blocks that were read from SSD to DRAM before the session's next turn: used once they were there, "
    )
    told += "asked for too soon, or dropped unused."
    return _counted(
        "Read ahead from SSD", told, [(name, a.curves.promoted_blocks) for name, a in chosen], "blocks"
    )


def _refusals(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    told = "Requests that were refused (of the first seed), and what would have been broken."
    return _counted(
        "Refused, by reason", told, [(name, a.curves.refused_by_reason) for name, a in chosen], "requests"
    )


def _counted(title: str, told: str, chosen: Sequence[tuple[str, dict[str, int]]], what: str) -> Plot | None:
    """Bars of what was counted, where anything was."""
    parts = list(dict.fromkeys(part for _, counts in chosen for part in counts))
    sizes = [[float(counts.get(part, 0)) for part in parts] for _, counts in chosen]
    most = max([sum(row) for row in sizes], default=0.0)
    return _bars(title, told, [name for name, _ in chosen], parts, sizes, most, what) if most else None


def _bars(
    title: str,
    told: str,
    called: Sequence[str],
    parts: Sequence[str],
    sizes: Sequence[Sequence[float]],
    most: float,
    what: str,
    shown: Callable[[float], str] | None = None,
) -> Plot:
    """Bars in parts; of whole things, where it is not said how a size is written."""
    whole, shown = shown is None, shown or axes.plain
    x = axes.Axis(0, most, *svg.LARGE.across(svg.bars_begin(called)), what, shown, whole=whole)
    drawing = svg.bar_plot(title, called, parts, sizes, x)
    rows = [[name, *(shown(round(each, 4)) for each in row)] for name, row in zip(called, sizes, strict=True)]
    return Plot(title, told, [("", drawing)], parts, ["run", *parts], rows)


def _errors(chosen: Sequence[tuple[str, Answer]]) -> Plot | None:
    drawn = [
        _error("time to first token", [(name, answer.curves.ttft_error_s) for name, answer in chosen]),
        _error("time between tokens", [(name, answer.curves.tbt_error_s) for name, answer in chosen]),
    ]
    if not any(drawn):
        return None
    errors = [f"{of}_error_p{share}_s" for of in ("ttft", "tbt") for share in (50, 90)]
    rows = [
        [name, *(_short_seconds(answer.figures[each]) for each in errors), *_output_errors(answer)]
        for name, answer in chosen
    ]
    told = "What admission counted on when it let a request in, against what became of it: left of the line "
    told += "it came earlier, right of it later. How long answers would be is learned from those that ended."
    head = ["run", "TTFT error P50", "P90", "TBT error P50", "P90", "answer's tokens, error P50", "P90"]
    drawings = [each for each in drawn if each is not None]
    return Plot("How well it was foretold", told, drawings, [name for name, _ in chosen], head, rows)


def _output_errors(answer: Answer) -> list[str]:
    found = [answer.figures[f"output_error_p{share}_tokens"] for share in (50, 90)]
    return ["–" if each is None else f"{each:,.0f}" for each in found]


def _error(heading: str, errors_s: Sequence[tuple[str, list[float]]]) -> tuple[str, str] | None:
    lines = []
    for colour, (name, ordered) in enumerate(errors_s):
        if ordered:
            lines.append(svg.Line(name, _cumulated(ordered), colour))
    if not lines:
        return None
    # The outermost hundredths would push all others together.
    inner = [x for line in lines for x, share in line.points if 0.01 <= share <= 0.99] or [0.0]
    reach = max(abs(each) for each in inner) * 1.05 or 0.01
    x = axes.Axis(-reach, reach, *svg.SMALL.across(), "measured less foretold", axes.seconds)
    y = axes.Axis(0, 1, *svg.SMALL.upwards(), "", axes.percent)
    marks = [svg.Mark("as foretold", 0.0)]
    return heading, svg.line_plot(f"Error of the foretold {heading}", lines, x, y, marks, svg.SMALL)


def _short_seconds(value_s: float | None) -> str:
    """Three digits are enough in a plot."""
    return "–" if value_s is None else axes.seconds(float(f"{value_s:.3g}"))
