"""Axes with round numbers on them, for values of any size: constant, tiny, huge, over many powers of ten."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MOST_TICKS = 7
_TINY = 1e-290
"""Below this a number is drawn as zero: steps between such numbers cannot be computed with."""
_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which number on an axis counts in which unit."""
_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; ticks as (number, words)."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; what lies beyond is put a little outside."""
        if self.log:
            value = math.log10(max(value, _TINY))
        return min(1.05, max(-0.05, (value - self._begin) / (self._end - self._begin)))

    @property
    def _begin(self) -> float:
        return math.log10(self.low) if self.log else self.low

    @property
    def _end(self) -> float:
        return math.log10(self.high) if self.log else self.high


def x_axis(low: float, high: float, whole: bool) -> Axis:
    """From the first point to the last, without room beside them. `whole`: only whole numbers have a meaning."""
    begin, end = (low - 1, high + 1) if whole and high - low < 1 and abs(low) < 1e15 else _apart(low, high)
    return Axis(begin, end, False, ticks(begin, end, least=1.0 if whole else 0.0))


def value_axis(values: np.ndarray, means: np.ndarray) -> Axis:
    """Room for all values; where they are many, for all but the furthest of them, and for the whole of the means.

    Logarithmic where the largest is many times the one in the middle; from zero where the smallest is not far from it.
    """
    low, high = float(values.min()), float(values.max())
    middle = float(np.median(values))
    if low > _TINY and high > 30 * middle:
        low, high = low * 0.8, high * 1.25
        return Axis(low, high, True, log_ticks(low, high))
    if len(values) >= 200:
        low, high = (float(end) for end in np.quantile(values, (0.004, 0.996)))
        low, high = min(low, float(means.min())), max(high, float(means.max()))
    below = low
    low, high = _apart(low, high)
    room = 0.06 * (high - low)
    bottom = 0.0 if 0 <= below < 0.4 * high else low - room
    return Axis(bottom, high + room, False, ticks(bottom, high + room))


def ticks(low: float, high: float, most: int = MOST_TICKS, least: float = 0.0) -> tuple[tuple[float, str], ...]:
    """Round numbers between two others: multiples of 1, 2 or 5 times a power of ten, at least `least` apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most)
    step = max(step, least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [number * step for number in range(first, last + 1)] if last - first <= 2 * most else []
    return tuple(zip(found, words(found, step), strict=True))


def log_ticks(low: float, high: float, most: int = MOST_TICKS) -> tuple[tuple[float, str], ...]:
    """Powers of ten, or every so many of them."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, -(-(last - first + 1) // most))
    powers = [power for power in range(first, last + 1) if not power % every]
    return tuple((10.0**power, f"{10.0**power:,g}" if -4 < power < 5 else _power(power)) for power in powers)


def words(numbers: list[float], step: float) -> list[str]:
    """All numbers of an axis alike: 0.25 and 0.50, 500 and 1,000, 20k and 40k, 1·10⁻⁷ and 2·10⁻⁷."""
    largest = max((abs(number) for number in numbers), default=0.0)
    if largest >= 1e15 or largest < 1e-3:
        power = math.floor(math.log10(largest)) if largest else 0
        digits = max(0, power - math.floor(math.log10(step) + 1e-9))
        # As text, since ten to the power of -300 cannot be divided by.
        return [_times(f"{number:.{digits}e}", number, power, digits) for number in numbers]
    unit, sign = next(((unit, sign) for begin, unit, sign in _UNITS if largest >= begin), (1.0, ""))
    if step < unit / 100 * 0.99:  # numbers that are close to each other: all of their digits
        unit, sign = 1.0, ""
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    plain = [f"{number / unit:,.{decimals}f}{sign}".replace("-", "−") for number in numbers]
    return [words if number else "0" for number, words in zip(numbers, plain, strict=True)]


def _times(text: str, number: float, power: int, digits: int) -> str:
    if not number:
        return "0"
    mantissa, own = text.split("e")
    shifted = float(mantissa) * 10.0 ** (int(own) - power)
    return f"{shifted:.{digits}f}·{_power(power)}".replace("-", "−")


def _power(power: int) -> str:
    return "10" + str(power).translate(_POWERS)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Two ends that differ enough to be divided by."""
    low, high = (0.0 if abs(end) < _TINY else end for end in (low, high))
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    room = 0.1 * size or 1.0
    return low - room, high + room
