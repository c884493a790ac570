"""What a Report's series are as charts: which curves stand together, thinned and smoothed. Nothing is drawn here.

A run of 100,000 steps has more points than a screen has dots. A curve is therefore cut into pieces of equally many points, of
which the lowest and the highest are drawn: no spike is lost. A curve that goes up and down all the time is drawn pale, with
its moving mean over it. Numbers that cannot be drawn (none, not finite, beyond 1e300) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchard.core.report_page_axis import Axis, value_axis, x_axis
from orchard.core.report_text import label

STEP = "step"
"""The series that the others are drawn over, where it is as long as they are."""
MOST_CHARTS = 48
PIECES = 500
"""Of the largest curve; a page with many curves has fewer of each."""
ALL_PIECES = 6000
FEW = 40
"""Up to so many points each is a dot."""
_LARGEST = 1e300
_TITLES = {"mfu": "MFU, share of the peak", "rate": "learning rate, factor", "norm": "norm of the gradients"}
_LAST = ("rate", "norm", "tokens/s", "mfu")
_HELD_OUT = "held out"
Floats = np.ndarray


@dataclass(frozen=True)
class Line:
    """One curve. `xs`, `ys`: what is drawn; `smooth`: the moving mean at the same places, or None."""

    name: str
    xs: Floats
    ys: Floats
    smooth: tuple[Floats, Floats] | None
    seen: tuple[Floats, Floats]
    """Points of the curve itself, for whoever asks for the numbers at a place."""
    count: int

    @property
    def dots(self) -> bool:
        return self.count <= FEW


@dataclass(frozen=True)
class Chart:
    title: str
    x_name: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    outside: int
    """Points beyond the axis, where a few would have flattened all others."""
    main: bool


@dataclass(frozen=True)
class Drawn:
    charts: list[Chart]
    left: list[str]
    """Titles of charts that would have been too many."""
    names: frozenset[str]
    """Series that are curves, drawn or left."""


def charts(series: Mapping[str, Sequence[Any]], most: int = MOST_CHARTS) -> Drawn:
    """The charts of all series that can be drawn."""
    names, groups = _groups(series)
    kept = groups[:most]
    pieces = max(60, min(PIECES, ALL_PIECES // max(1, sum(len(lines) for _, _, lines, _ in kept))))
    made = [_chart(*group, pieces) for group in kept]
    return Drawn(made, [title for title, *_ in groups[most:]], names)


def numbers(points: Sequence[Any]) -> Floats:
    """Each as a float; NaN where it cannot be drawn."""
    if set(map(type, points)) <= {float, type(None)}:  # the usual ones, without a look at each
        found = np.array(points, dtype=np.float64)
        found[~(np.abs(found) <= _LARGEST)] = np.nan
        return found
    return np.array([_number(point) for point in points], dtype=np.float64)


def smoothed(ys: Floats) -> Floats:
    """The mean over a fiftieth of the points around each, nearer ones counting more (two running means, one after the other)."""
    scale = float(np.abs(ys).max()) or 1.0
    half = max(2, len(ys) // 100)
    mean = ys / scale  # sums of very large numbers must not overflow
    for _ in range(2):
        total = np.concatenate([[0.0], np.cumsum(mean)])
        at = np.arange(len(mean))
        back = np.minimum(half, at)
        # A beginning is steep, so there the mean reaches as far ahead as it can look back; an end is only noisy.
        ahead = np.minimum(np.minimum(half, back + half // 16 + 1), len(mean) - 1 - at)
        mean = (total[at + ahead + 1] - total[at - back]) / (ahead + back + 1)
    return mean * scale


def restless(ys: Floats) -> bool:
    """Whether a curve goes up and down so much that its mean says more: it travels many times its own height."""
    height = float(ys.max() / 2 - ys.min() / 2) * 2
    return len(ys) >= 30 and height > 0 and float(np.abs(np.diff(ys / height)).sum()) > 3


def thin(xs: Floats, ys: Floats, pieces: int) -> tuple[Floats, Floats]:
    """The lowest and the highest point of each of so many pieces, in order, with both ends."""
    if len(xs) <= 2 * pieces:
        return xs, ys
    starts = np.linspace(0, len(ys), pieces + 1).astype(int)[:-1]
    stops = np.append(starts[1:], len(ys))
    kept = {0, len(ys) - 1}
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        part = ys[start:stop]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


# Which curves stand together ------------------------------------------------------------------------------------------------

Curves = dict[str, tuple[Floats, Floats]]
Group = tuple[str, str, Curves, bool]


def _groups(series: Mapping[str, Sequence[Any]]) -> tuple[frozenset[str], list[Group]]:
    """(title, name of the x axis, curves, whether it is the main one): losses first and together, speeds last."""
    steps = numbers(series.get(STEP, ()))
    curves: Curves = {}
    tables: list[Group] = []
    over: dict[str, str] = {}
    drawn = {STEP} if len(steps) and len(series) > 1 else set()
    for name, points in series.items():
        columns = None if name in drawn else _columns(points)
        names = _names(name, len(columns) - 1) if columns is not None else []
        if columns is None or not names:
            continue
        counted = not isinstance(points[0], (list, tuple)) and len(steps) == len(points)
        over[name] = STEP if counted or name.startswith(_HELD_OUT) else ""
        xs = steps if counted else columns[0]
        found = {one: both for one, ys in zip(names, columns[1:], strict=True) if (both := _clean(xs, ys)) is not None}
        if not found:
            continue
        drawn.add(name)
        if len(names) > 1:
            tables.append((label(name.partition(":")[0]), "", found, False))
        else:
            curves[name] = found[name]
    return frozenset(drawn), [*_losses(curves, over), *_others(curves, over), *tables]


def _losses(curves: Curves, over: Mapping[str, str]) -> list[Group]:
    """Loss and held-out losses in one chart; and the later half again where the beginning leaves no room for it."""
    if "loss" not in curves:
        return []
    together = {name: both for name, both in curves.items() if name == "loss" or name.startswith(_HELD_OUT)}
    together = {"loss": together.pop("loss"), **together}
    groups: list[Group] = [("loss", over["loss"], together, True)]
    xs, ys = together["loss"]
    if len(xs) >= 200:
        middle, mean = xs[len(xs) // 2], smoothed(ys)
        later = mean[len(xs) // 2 :]
        if float(later.max() / 2 - later.min() / 2) < 0.25 * float(mean.max() / 2 - mean.min() / 2):
            halves = {name: (x[x >= middle], y[x >= middle]) for name, (x, y) in together.items()}
            kept = {name: both for name, both in halves.items() if len(both[0])}
            groups.append(("loss, the later half", over["loss"], kept, False))
    return groups


def _others(curves: Curves, over: Mapping[str, str]) -> list[Group]:
    rest = [name for name in curves if not ("loss" in curves and (name == "loss" or name.startswith(_HELD_OUT)))]
    rest.sort(key=lambda name: _LAST.index(name) if name in _LAST else -1)
    return [(_TITLES.get(name, label(name)), over[name], {name: curves[name]}, False) for name in rest]


def _columns(points: Sequence[Any]) -> list[Floats] | None:
    """x and one or more ys; None where these are not numbers."""
    if not points:
        return None
    if not isinstance(points[0], (list, tuple)):
        ys = numbers(points)
        return None if np.isnan(ys).all() else [np.arange(len(ys), dtype=np.float64), ys]
    width = len(points[0])
    rows = [point for point in points if isinstance(point, (list, tuple)) and len(point) == width]
    if width < 2 or any(isinstance(item, str) for row in rows for item in row):
        return None
    return [numbers([row[column] for row in rows]) for column in range(width)]


def _names(name: str, columns: int) -> list[str]:
    """One curve has the name of its series; `loss by step: direct, think` names two."""
    if columns == 1:
        return [name]
    said = [part.strip() for part in name.partition(":")[2].split(",")]
    return said if len(set(said)) == columns == len(said) else []


def _clean(xs: Floats, ys: Floats) -> tuple[Floats, Floats] | None:
    fine = np.isfinite(xs) & np.isfinite(ys)
    if not fine.any():
        return None
    xs, ys = xs[fine], ys[fine]
    order = np.argsort(xs, kind="stable")
    return xs[order], ys[order]


def _chart(title: str, x_name: str, curves: Curves, main: bool, pieces: int) -> Chart:
    lines = tuple(_line(label(name), *both, pieces) for name, both in curves.items())
    every = [ys for _, ys in curves.values()]
    means = [line.smooth[1] if line.smooth is not None else line.ys for line in lines]
    y = value_axis(np.concatenate(every), np.concatenate(means))
    ends = [float(end) for xs, _ in curves.values() for end in (xs[0], xs[-1])]
    outside = int(sum(((ys < y.low) | (ys > y.high)).sum() for ys in every))
    whole = all(bool((xs == xs.round()).all()) for xs, _ in curves.values())
    return Chart(title, x_name, x_axis(min(ends), max(ends), whole), y, lines, outside, main)


def _line(name: str, xs: Floats, ys: Floats, pieces: int) -> Line:
    mean = smoothed(ys) if restless(ys) else None
    chosen = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), pieces)).round().astype(int))
    smooth = None if mean is None else (xs[chosen], mean[chosen])
    return Line(name, *thin(xs, ys, pieces), smooth, (xs[chosen], ys[chosen]), len(xs))


def _number(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    return float(value) if isinstance(value, bool) else float("nan")
