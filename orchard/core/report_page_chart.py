"""A chart as HTML: lines are SVG that stretches to whatever room there is, words are HTML that does not stretch with it.

So one text suits a wide screen and a telephone. Lines keep their width while they are stretched (`non-scaling-stroke`). The
numbers that a reader can ask for are in `data-chart`, for the script in `report_page_script`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

import numpy as np

from orchard.core.report_page_axis import Axis
from orchard.core.report_page_curves import Chart, Line
from orchard.core.report_text import show, tidy

WIDE, HIGH = 10_000, 1_000
"""The drawing's own units."""
COLOURS = 6


def chart_html(chart: Chart) -> str:
    """The whole figure."""
    gutter = max(len(chart.x_name), *(len(words) for _, words in chart.y.ticks), 1)
    keys = "".join(_key(index, line) for index, line in enumerate(chart.lines)) if len(chart.lines) > 1 else ""
    beyond = f'<span class="q">points beyond the axis: {chart.outside:,}</span>' if chart.outside else ""
    # The first thing in a caption is what it is about; what is asked for by pointing stands in its own line.
    caption = f'<figcaption><b>{escape(chart.title)}</b>{keys}{beyond}<span class="said"></span></figcaption>'
    drawing = (
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" aria-label="{escape(summary(chart))}">'
        f'<path class="grid" d="{_grid(chart.y)}"/>{"".join(_drawn(i, line, chart) for i, line in enumerate(chart.lines))}</svg>'
    )
    ys = "".join(f'<i style="top:{100 - 100 * chart.y.place(at):.2f}%">{words}</i>' for at, words in chart.y.ticks)
    xs = "".join(
        f'<i class="{_tick_kind(index, chart.x.place(at))}" style="left:{100 * chart.x.place(at):.2f}%">{words}</i>'
        for index, (at, words) in enumerate(chart.x.ticks)
    )
    crowded = sum(len(words) + 2 for _, words in chart.x.ticks) > 32
    kind = "chart" + (" main" if chart.main else "") + (" crowded" if crowded else "")
    return (
        f'<figure class="{kind}" tabindex="0" data-chart="{escape(_data(chart))}">{caption}'
        f'<div class="plot" style="--gutter:{gutter}ch"><div class="ys">{ys}</div><div class="area">{drawing}</div>'
        f'<div class="x">{escape(chart.x_name)}</div><div class="xs">{xs}</div></div></figure>'
    )


def summary(chart: Chart) -> str:
    """A chart in words."""
    parts = []
    for line in chart.lines:
        xs, ys = line.seen
        span = f"from {show(tidy(float(xs[0])))} to {show(tidy(float(xs[-1])))}"
        ends = (
            f"first {_said(ys[0])}, last {_said(ys[-1])}, lowest {_said(line.ys.min())}, highest {_said(line.ys.max())}"
        )
        parts.append(f"{line.name}, {line.count:,} points {span}: {ends}")
    return "; ".join(parts)


def escape(text: object) -> str:
    """Text that means itself, in a page and in an attribute. Half of a surrogate pair has no bytes, and is shown as unknown."""
    whole = str(text).encode("utf-8", "replace").decode()
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in whole), quote=True)


def _tick_kind(index: int, place: float) -> str:
    """Every other tick goes where there is little room; the last one stays inside."""
    return ("t" if index % 2 else "t odd") + (" end" if place > 0.96 else "")


def _key(index: int, line: Line) -> str:
    return f'<span class="key c{index % COLOURS}">{escape(line.name)}</span>'


def _drawn(index: int, line: Line, chart: Chart) -> str:
    colour = f"c{index % COLOURS}"
    raw = _path(line.xs, line.ys, chart)
    if line.smooth is not None:
        return f'<path class="raw {colour}" d="{raw}"/><path class="line {colour}" d="{_path(*line.smooth, chart)}"/>'
    dots = f'<path class="dots {colour}" d="{_dots(line, chart)}"/>' if line.dots else ""
    return f'<path class="line {colour}" d="{raw}"/>{dots}'


def _path(xs: np.ndarray, ys: np.ndarray, chart: Chart) -> str:
    places = _places(xs, ys, chart)
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _dots(line: Line, chart: Chart) -> str:
    """Strokes of no length with round ends: a circle would be stretched."""
    return "".join(f"M{x} {y}h1" for x, y in _places(line.xs, line.ys, chart))


def _places(xs: np.ndarray, ys: np.ndarray, chart: Chart) -> list[tuple[int, int]]:
    pairs = zip(xs.tolist(), ys.tolist(), strict=True)
    return [(round(WIDE * chart.x.place(x)), round(HIGH - HIGH * chart.y.place(y))) for x, y in pairs]


def _grid(axis: Axis) -> str:
    return "".join(f"M0 {round(HIGH - HIGH * axis.place(at))}H{WIDE}" for at, _ in axis.ticks)


def _data(chart: Chart) -> str:
    """What the script needs: both axes, and for each curve its name, points and means."""
    lines = [
        [
            line.name,
            _short(line.seen[0]),
            _short(line.seen[1]),
            [] if line.smooth is None else _short(line.smooth[1]),
        ]
        for line in chart.lines
    ]
    axes = [[axis.low, axis.high, int(axis.log)] for axis in (chart.x, chart.y)]
    return json.dumps([chart.x_name or "x", *axes, lines], separators=(",", ":"), ensure_ascii=True)


def _short(values: np.ndarray) -> Sequence[float | int]:
    return [tidy(float(f"{value:.6g}")) if abs(value) < 1e15 else float(f"{value:.6g}") for value in values.tolist()]


def _said(value: float) -> str:
    return show(float(value))
