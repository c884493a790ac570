"""How many guesses are worth their cost: as many as give the most tokens in a second, by what was kept and what calls took.

A row whose guesses come true with probability a gets a + a² + … + aᵏ tokens more from k guesses. All rows share one call, whose
time depends on all its tokens together. So the n best of all possible guesses are taken, for the n at which tokens divided by
time are most. That is exact for any law of time, also one with jumps, as kernels with tiles have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

LEAST, MOST = 0.02, 0.98
"""Bounds on what is believed of a rate: nothing is certain."""
MEMORY = 0.95
"""What a call leaves of the weight of earlier ones."""
WIDEST = 1024
"""Tokens of a call whose time is told apart from that of wider ones."""
SLOPE = 0.15
"""Time of one more token, in calls of one token: what is believed before anything was measured."""
NEARBY = (1, -1000, 2, -1, 4, -2)
"""Every now and then a little more or less is guessed than seems best, or nothing, to know what it costs."""
EXPLORE, SETTLED = 8, 24
"""Calls between two of those, in the first few hundred calls and later."""
WORTH = 1.03
"""Guesses that win less are not made: so little cannot be told from chance."""
FEW, WINDOW = 3, 7
"""Calls of one width before its time is believed, and those that count."""
RENEW = 4
"""Calls after which the times of all widths are worked out anew."""


def nearby(call: int) -> int:
    """How much more or less to guess in this call, by its number."""
    turn, rest = divmod(call, EXPLORE if call < 300 else SETTLED)
    return NEARBY[turn % len(NEARBY)] if rest == 0 else 0


class Rate:
    """How often guesses come true, as long as those before them did. Newer ones count more."""

    def __init__(self, believed: float, weight: float = 3.0) -> None:
        self._kept = believed * weight
        self._tried = weight

    @property
    def value(self) -> float:
        return min(max(self._kept / self._tried, LEAST), MOST)

    def add(self, kept: int, refused: bool) -> None:
        """`refused`: whether a guess after those kept was judged, and was wrong."""
        self._kept = MEMORY * self._kept + kept
        self._tried = MEMORY * self._tried + kept + refused


class CallTimes:
    """Seconds of a call by its tokens: for each width the median of its last few calls, straight lines between widths.

    Times are kept in units of how quick the machine is just now, which is one number for all widths and follows at once: a
    program that takes half of the core for a while must not make the widths in use look dear beside the others.
    """

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._last: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._speed = 0.0
        self._curve = 1.0 + slope * np.arange(WIDEST + 1)
        self._news = 0

    def known(self, tokens: int) -> bool:
        """Whether calls of about this width were met often enough: of half to twice as many tokens."""
        tokens = min(tokens, WIDEST)
        if len(self._last.get(tokens, ())) >= FEW:
            return True
        return any(len(last) >= FEW and width <= 2 * tokens <= 4 * width for width, last in self._last.items())

    def add(self, tokens: int, seconds: float) -> None:
        tokens = min(max(tokens, 1), WIDEST)
        if not seconds > 0:
            return
        usual = self._medians.get(tokens)
        if not self._speed:
            self._speed = seconds
        elif usual is not None:
            ratio = min(seconds / self._speed / usual, 1.5)  # a single slow call says little
            self._speed *= 1 + 0.3 * (ratio - 1)
        last = self._last.setdefault(tokens, deque(maxlen=WINDOW))
        last.append(seconds / self._speed)
        # Of very few the shortest: what disturbs a measurement makes it longer.
        self._medians[tokens] = sorted(last)[len(last) // 2 if len(last) > FEW else 0]
        self._news += 1 if len(last) > FEW else RENEW

    def seconds(self, first: int, count: int) -> np.ndarray:
        """Of calls with `first`, `first` + 1, … tokens."""
        if self._news >= RENEW:
            self._news = 0
            self._curve = self._drawn()
        curve = self._curve[first : first + count]
        if len(curve) < count:
            curve = self._curve[np.minimum(np.arange(first, first + count), WIDEST)]
        return curve * (self._speed or 1.0)

    def _drawn(self) -> np.ndarray:
        """The times of all widths. Beyond those that were met they go on as steeply as within them."""
        widths = np.array(sorted(self._medians))
        times = np.array([self._medians[width] for width in widths.tolist()])
        times = np.minimum.accumulate(times[::-1])[::-1]  # more tokens are never quicker, so the shorter time is right
        low, high = widths[0], widths[-1]
        slope = (times[-1] - times[0]) / (high - low) if high > low else self._slope * times[0]
        every = np.arange(WIDEST + 1)
        curve: np.ndarray = np.interp(every, widths, times)
        curve += slope * np.maximum(every - high, 0)
        return np.maximum(curve - slope * np.maximum(low - every, 0), 0.1 * times[0])


def best_lengths(
    rates: Sequence[float], most: Sequence[int], costs: Sequence[float], times: CallTimes, given: int, more: int = 0
) -> list[int]:
    """How many guesses each row should have. `most`: how many it can have; `costs`: seconds that making one of its guesses
    takes; `given`: tokens that the call has anyway; `more`: how many more (or fewer) in all than seems best."""
    longest = max(most, default=0)
    if longest < 1 or not times.known(given):  # what a call takes without guesses comes first
        return [0] * len(rates)
    if len(rates) == 1:
        return [_best_length(rates[0], longest, costs[0], times.seconds(given, longest + 1).tolist(), more)]
    powers = np.arange(1, longest + 1)
    gains = np.asarray(rates, np.float64)[:, None] ** powers
    gains[powers > np.asarray(most)[:, None]] = -1.0  # cannot be had
    order = np.argsort(-gains, axis=None, kind="stable")[: sum(most)]
    row = order // longest
    tokens = len(rates) + np.concatenate([[0.0], gains.reshape(-1)[order].cumsum()])
    making = np.concatenate([[0.0], np.asarray(costs, np.float64)[row].cumsum()])
    speeds = tokens / (times.seconds(given, len(tokens)) + making)
    taken = int(np.argmax(speeds))
    if speeds[taken] < WORTH * speeds[0]:
        return [0] * len(rates)
    taken = min(max(taken + more, 0), len(order))
    return [int(count) for count in np.bincount(row[:taken], minlength=len(rates))]


def _best_length(rate: float, most: int, cost: float, seconds: Sequence[float], more: int) -> int:
    """The same for one row, without arrays: most often there is no other."""
    best, speed, tokens, gain = 0, WORTH / seconds[0], 1.0, 1.0
    for length in range(1, most + 1):
        gain *= rate
        tokens += gain
        if tokens > speed * (seconds[length] + length * cost):
            best, speed = length, tokens / (seconds[length] + length * cost)
    return min(max(best + more, 0), most) if best else 0
