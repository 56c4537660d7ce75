"""Plots as inline SVG: lines over two axes, and bars in parts.

Colours are classes (`s0` to `s7`), which the page defines for light and dark; lines also differ in their
dashes, so that nobody needs to tell colours apart. Each plot is one image to a screen reader, named and
described; its numbers stand in a table that the page puts beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mooncakectl.simulate.report.axes import Axis

COLOURS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 24, 46
_BAR, _GAP = 20, 10


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a drawing, in pixels at its natural size."""

    width: int
    height: int

    def across(self, begin: float = _LEFT) -> tuple[float, float]:
        """Where its horizontal axis begins and ends."""
        return begin, self.width - _RIGHT

    def upwards(self) -> tuple[float, float]:
        """Where its vertical axis begins and ends."""
        return self.height - _BOTTOM, _TOP


LARGE, SMALL = Frame(680, 320), Frame(440, 220)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: its points, and the number of its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A limit: a straight line across the plot."""

    name: str
    value: float
    vertical: bool = True


def line_plot(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    frame: Frame = LARGE,
) -> str:
    """Curves in one frame.

    Args:
        title: what a screen reader says of it.
        lines: the curves; of a colour's number only the remainder counts.
        x: between the ends of `frame.across()`.
        y: between those of `frame.upwards()`.
        marks: limits to show.
        frame: its size.
    """
    height = frame.height
    parts = [_open(title, frame), *_grid(x, y, height)]
    for line in lines:
        points = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in line.points)
        colour = line.colour % COLOURS
        name = f"<title>{escape(line.name)}</title>"
        parts.append(f'<polyline class="line s{colour} d{colour}" points="{points}">{name}</polyline>')
        if line.dots:
            parts += [
                f'<circle class="dot s{colour}" cx="{x.place(a):.1f}" cy="{y.place(b):.1f}" r="3.5">'
                f"<title>{escape(f'{line.name}: {x.shown(a)}, {y.shown(b)}')}</title></circle>"
                for a, b in line.points
            ]
    parts += [_mark(mark, x, y, height) for mark in marks]
    return "".join([*parts, "</svg>"])


def bar_plot(
    title: str, names: Sequence[str], parts: Sequence[str], values: Sequence[Sequence[float]], x: Axis
) -> str:
    """A lying bar for each name, in parts beside each other.

    Args:
        title: what a screen reader says of it.
        names: of the bars, shortened where they do not fit.
        parts: what each bar consists of.
        values: for each bar, the size of each part.
        x: from `bars_begin()` to the end of a large frame.
    """
    height = _TOP + len(names) * (_BAR + _GAP) + _BOTTOM
    drawn = [_open(title, Frame(LARGE.width, height)), *_vertical_grid(x, height)]
    for row, (name, sizes) in enumerate(zip(names, values, strict=True)):
        top = _TOP + row * (_BAR + _GAP) + _GAP / 2
        drawn.append(
            f'<text class="tick" x="{x.begin - 8:.0f}" y="{top + _BAR * 0.7:.1f}" text-anchor="end">'
            f"{escape(_shortened(name))}</text>"
        )
        done = 0.0
        for colour, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            begin, end = x.place(done), x.place(done + size)
            done += size
            if end - begin > 0.05:
                drawn.append(
                    f'<rect class="bar s{colour % COLOURS}" x="{begin:.1f}" y="{top:.1f}" '
                    f'width="{end - begin:.1f}" height="{_BAR}">'
                    f"<title>{escape(f'{name}, {part}: {x.shown(size)}')}</title></rect>"
                )
    return "".join([*drawn, "</svg>"])


def bars_begin(names: Sequence[str]) -> float:
    """Where bars begin, so that their names stand before them."""
    return 16 + 6.6 * max([len(_shortened(name)) for name in names], default=0)


def _shortened(name: str) -> str:
    return name if len(name) <= 38 else name[:37] + "…"


def _open(title: str, frame: Frame) -> str:
    return f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {frame.width} {frame.height}">'


def _grid(x: Axis, y: Axis, height: int) -> list[str]:
    parts = _vertical_grid(x, height)
    for tick in y.ticks():
        place = y.place(tick)
        parts.append(f'<path class="grid" d="M{x.begin:.1f} {place:.1f}H{x.end:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x.begin - 7:.1f}" y="{place + 4:.1f}" text-anchor="end">'
            f"{escape(y.shown(tick))}</text>"
        )
    if y.label:
        parts.append(f'<text class="label" x="4" y="11">{escape(y.label)}</text>')
    return parts


def _vertical_grid(x: Axis, height: int) -> list[str]:
    bottom = height - _BOTTOM
    parts = [f'<path class="axis" d="M{x.begin:.1f} {_TOP}V{bottom}H{x.end:.1f}"/>']
    for tick in x.ticks():
        place = x.place(tick)
        parts.append(f'<path class="grid" d="M{place:.1f} {_TOP}V{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{escape(x.shown(tick))}</text>"
        )
    middle = (x.begin + x.end) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{escape(x.label)}</text>'
    )
    return parts


def _mark(mark: Mark, x: Axis, y: Axis, height: int) -> str:
    name = escape(mark.name)
    if mark.vertical:
        place = x.place(mark.value)
        # The name stands on the side where there is room for it.
        anchor, beside = ("end", -5) if place > (x.begin + x.end) / 2 else ("start", 5)
        return (
            f'<path class="limit" d="M{place:.1f} {_TOP}V{height - _BOTTOM}"/>'
            f'<text class="limit-name" x="{place + beside:.1f}" y="{height - _BOTTOM - 8}" '
            f'text-anchor="{anchor}">{name}</text>'
        )
    place = y.place(mark.value)
    return (
        f'<path class="limit" d="M{x.begin:.1f} {place:.1f}H{x.end:.1f}"/>'
        f'<text class="limit-name" x="{x.end - 4:.1f}" y="{place - 5:.1f}" text-anchor="end">{name}</text>'
    )
