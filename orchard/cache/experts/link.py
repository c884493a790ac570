"""A simulated line between the place where units live and memory: one transfer at a time, urgent ones first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchard.cache.experts.policies import Key


@dataclass(frozen=True)
class Hardware:
    """Seconds of things. The default is a phone's flash beside a small mixture: a unit of 6 MB at 2 GB/s."""

    transfer: float = 3e-3
    """Of one unit, its latency included."""
    compute: float = 8e-3
    """Of one layer and pass."""


class Link:
    """Transfers in order; what is needed now overtakes what was only expected, but does not break off what has begun."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free = 0.0  # when the transfer under way ends
        self._urgent: deque[Key] = deque()
        self._ahead: deque[Key] = deque()
        self._arrives: dict[Key, float] = {}

    def ask(self, key: Key, now: float, *, ahead: bool) -> None:
        self._run(now)
        self._free = max(self._free, now)
        self._arrives.pop(key, None)
        (self._ahead if ahead else self._urgent).append(key)

    def cancel(self, key: Key, now: float) -> None:
        """The slot of a key was given to another."""
        self._run(now)
        for queue in (self._ahead, self._urgent):
            if key in queue:
                queue.remove(key)
        self._arrives.pop(key, None)

    def wait(self, keys: list[Key], now: float) -> float:
        """The moment at which all these keys are there."""
        self._run(now)
        for key in keys:
            if key in self._ahead:
                self._ahead.remove(key)
                self._urgent.append(key)
        while any(key in self._urgent for key in keys):
            self._next()
        return max([now, *(self._arrives.get(key, now) for key in keys)])

    def _run(self, now: float) -> None:
        """Begin what began before this moment."""
        while (self._urgent or self._ahead) and self._free <= now:
            self._next()

    def _next(self) -> None:
        key = (self._urgent or self._ahead).popleft()
        self._free += self._seconds
        self._arrives[key] = self._free
