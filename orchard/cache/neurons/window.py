"""Who stays: neurons that one of the last `size` tokens used (arXiv 2312.11514, "sliding window").

Neighbouring tokens use much the same neurons, so a token loads only what the last ones did not use. A neuron goes when so many
tokens have passed without it. Tokens remember which neurons they used, so finding those that leave costs as much as a token
used, not as much as there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from orchard.cache.neurons.buffer import NeuronBuffer, Units
from orchard.core.errors import ConfigError

LONG_AGO = -(1 << 60)
NONE: Units = np.empty(0, np.int64)


@dataclass
class Tally:
    """What went through a window, in neurons. Bytes and reads are counted by the file."""

    calls: int = 0
    tokens: int = 0
    wanted: int = 0
    """Summed over calls."""
    hits: int = 0
    loaded: int = 0
    passed: int = 0
    """Of those loaded, neurons that were used at once and not kept: the first tokens of a prompt want many."""
    dropped: int = 0
    resident: int = 0
    """Summed over calls, after each."""
    peak: int = 0
    """The most at once, while a call was computed."""

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(frozen=True)
class Plan:
    """What a call has to bring: neurons to load and keep, and neurons to load, use and forget."""

    wanted: Units
    recent: Sequence[Units]
    tokens: int
    stay: Units
    passing: Units


class NeuronWindow:
    """`begin` a call with what its tokens want, append what the plan says, compute, `end` the call. A call that fails in between
    leaves everything in order: it is as if its tokens had not been."""

    def __init__(self, buffer: NeuronBuffer, size: int) -> None:
        if size < 0:
            raise ConfigError(f"a window of {size} tokens", hint="use 0 to keep nothing from token to token, or more")
        self.buffer, self.size = buffer, size
        self.tally = Tally()
        self._used = np.full(buffer.units, LONG_AGO, np.int64)
        self._marked = np.zeros(buffer.units, bool)
        self._tokens: deque[tuple[int, Units]] = deque()
        self._now = 0

    def begin(self, wanted: Units, recent: Sequence[Units], tokens: int) -> Plan:
        """`wanted`: all that the tokens of a call use, each once; `recent`: what each of its last ones uses (as many as the
        window is long, or all), in order. What leaves the window goes first, to make room."""
        if len(recent) != min(tokens, self.size):
            raise ConfigError(
                f"{len(recent)} of {tokens} tokens say what they use", hint=f"the last {self.size} have to"
            )
        self._marked[wanted] = True
        try:
            missing = wanted[~self.buffer.held(wanted)]
            self._expire(self._now + tokens - self.size)
            stay = missing if len(recent) == tokens else self._among(missing, recent)
            stay = stay[: self._make_room(len(stay))]
        finally:
            self._marked[wanted] = False
        passing = missing if not len(stay) else NONE
        if 0 < len(stay) < len(missing):
            passing = np.setdiff1d(missing, stay, assume_unique=True)
        return Plan(wanted, recent, tokens, stay, passing)

    def end(self, plan: Plan) -> None:
        """Remember what the tokens used, and let go what only the first of them did."""
        self.tally.peak = max(self.tally.peak, self.buffer.count)
        self._now += plan.tokens
        for back, units in zip(range(len(plan.recent) - 1, -1, -1), plan.recent, strict=True):
            self._used[units] = self._now - back
            self._tokens.append((self._now - back, units))
        self._expire(self._now - self.size)
        self._count(plan)

    def clear(self) -> None:
        """Forget everything, as before another text."""
        self.buffer.drop(self.buffer.resident().copy())
        self._used[:] = LONG_AGO
        self._tokens.clear()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _expire(self, until: int) -> None:
        """Drop what was last used up to this token; what the call wants again (marked) waits for its end."""
        waiting = []
        while self._tokens and self._tokens[0][0] <= until:
            used, units = self._tokens.popleft()
            units = units[(self._used[units] == used) & self.buffer.held(units)]
            again = self._marked[units]
            self._drop(units[~again])
            if again.any():
                waiting.append((used, units[again]))
        self._tokens.extendleft(reversed(waiting))

    def _make_room(self, many: int) -> int:
        """Free as many rows, from those used longest ago that nobody wants now. How many there are."""
        for used, units in self._tokens:
            short = many - self.buffer.free
            if short <= 0:
                break
            old = units[(self._used[units] == used) & self.buffer.held(units) & ~self._marked[units]]
            self._drop(old[:short])
        return min(many, self.buffer.free)

    @staticmethod
    def _among(missing: Units, recent: Sequence[Units]) -> Units:
        """Those of the missing that the last tokens use: only these are worth keeping."""
        stays: Units = missing[np.isin(missing, np.concatenate([NONE, *recent]))]
        return stays

    def _drop(self, units: Units) -> None:
        self.buffer.drop(units)
        self.tally.dropped += len(units)

    def _count(self, plan: Plan) -> None:
        tally, loaded = self.tally, len(plan.stay) + len(plan.passing)
        tally.calls += 1
        tally.tokens += plan.tokens
        tally.wanted += len(plan.wanted)
        tally.hits += len(plan.wanted) - loaded
        tally.loaded += loaded
        tally.passed += len(plan.passing)
        tally.resident += self.buffer.count
