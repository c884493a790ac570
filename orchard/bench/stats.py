"""Numbers of several rounds in few words: medians with quartiles, ratios of medians, and a straight line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from orchard.core.errors import UsageError


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise UsageError("no values to take the median of", hint="measure at least one round")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The ratio of two medians; its quartiles are those of the ratios within each round, where both were measured in it."""
    value = statistics.median(over) / statistics.median(under)
    within = spread([one / other for one, other in zip(over, under)])
    return Spread(value, min(value, within.low), max(value, within.high))


@dataclass(frozen=True)
class Line:
    """y ≈ start + slope · x, and the share of the variance of y that it explains."""

    start: float
    slope: float
    r2: float


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares."""
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise UsageError("a line needs two points or more", hint="give as many y as x")
    fit = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    rest = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(fit.intercept, fit.slope, 1 - rest / total if total else 1.0)
