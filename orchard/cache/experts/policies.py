"""Which resident unit makes room for the next one.

A policy is told what happens (a pass begins, a key is used, prefetched, removed) and names the key to evict. It never
moves a byte, so the same object serves the engine and the simulator. A key is (layer, unit).

Least-Stale is the rule of SpecMD (arXiv 2602.03921): within one pass the layers run in order, so what was just used is
needed last. LRU keeps exactly that, and drops what was prefetched for the next layers. Least-Stale keeps two generations:
what was touched in this pass and what was not, and evicts the stale ones first, each generation in order of arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchard.core.errors import UsageError

Key = tuple[int, int]
Free = Callable[[Key], bool]


class Policy(ABC):
    """What is resident, in an order of its own."""

    name: str

    def begin_pass(self) -> None:  # noqa: B027 (most policies do not care)
        """A forward pass begins: the layers will run in order from here."""

    @abstractmethod
    def used(self, key: Key, score: float = 0.0) -> None:
        """A layer needs this key now. It is resident, or becomes so by this."""

    @abstractmethod
    def prefetched(self, key: Key, score: float = 0.0) -> None:
        """Somebody expects this key to be needed soon. It is resident, or becomes so by this."""

    @abstractmethod
    def removed(self, key: Key) -> None:
        """The key is no longer resident."""

    @abstractmethod
    def order(self) -> Iterable[Key]:
        """Resident keys, the one to evict first."""

    def victim(self, free: Free) -> Key | None:
        """The key to evict among those that are free to go; None where there is none."""
        return next((key for key in self.order() if free(key)), None)


class _Queue(Policy):
    """Keys in one row; subclasses say what moves a key to its end."""

    def __init__(self) -> None:
        self._row: OrderedDict[Key, None] = OrderedDict()

    def removed(self, key: Key) -> None:
        self._row.pop(key, None)

    def order(self) -> Iterable[Key]:
        return self._row

    def _last(self, key: Key) -> None:
        self._row[key] = None
        self._row.move_to_end(key)


class FIFO(_Queue):
    """The first to come is the first to go, used or not."""

    name = "fifo"

    def used(self, key: Key, score: float = 0.0) -> None:
        self._row.setdefault(key)

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._row.setdefault(key)


class LRU(_Queue):
    """The least recently used goes. A prefetch of what is already there does not count as use."""

    name = "lru"

    def used(self, key: Key, score: float = 0.0) -> None:
        self._last(key)

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._row.setdefault(key)


class LRUTouch(LRU):
    """LRU for which a prefetch counts as use."""

    name = "lru-touch"

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._last(key)


class LFU(Policy):
    """The least often used goes; the earlier one among equals. Counts outlive residence."""

    name = "lfu"

    def __init__(self) -> None:
        self._resident: dict[Key, None] = {}
        self._count: dict[Key, int] = {}

    def used(self, key: Key, score: float = 0.0) -> None:
        self._resident.setdefault(key)
        self._count[key] = self._count.get(key, 0) + 1

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._resident.setdefault(key)

    def removed(self, key: Key) -> None:
        self._resident.pop(key, None)

    def order(self) -> Iterable[Key]:
        return sorted(self._resident, key=lambda key: self._count.get(key, 0))


class GateScore(Policy):
    """The lowest router score goes: the last one seen of each key, halved at every pass in which it was not seen."""

    name = "gate-score"

    def __init__(self, decay: float = 0.5) -> None:
        self._scores: dict[Key, tuple[float, int]] = {}
        self._decay = decay
        self._pass = 0

    def begin_pass(self) -> None:
        self._pass += 1

    def used(self, key: Key, score: float = 0.0) -> None:
        self._scores[key] = score, self._pass

    prefetched = used

    def removed(self, key: Key) -> None:
        self._scores.pop(key, None)

    def order(self) -> Iterable[Key]:
        def now(key: Key) -> float:
            score, seen = self._scores[key]
            return score * self._decay ** (self._pass - seen)

        return sorted(self._scores, key=now)


class LeastStale(Policy):
    """Two generations, each in order of arrival: what this pass has not touched goes first."""

    name = "least-stale"

    def __init__(self) -> None:
        self._stale: dict[Key, None] = {}
        self._current: dict[Key, None] = {}

    def begin_pass(self) -> None:
        self._stale.update(self._current)  # those left over from before stay in front
        self._current = {}

    def used(self, key: Key, score: float = 0.0) -> None:
        self._stale.pop(key, None)
        self._current.setdefault(key)

    prefetched = used

    def removed(self, key: Key) -> None:
        self._stale.pop(key, None)
        self._current.pop(key, None)

    def order(self) -> Iterable[Key]:
        yield from self._stale
        yield from self._current


class Belady(Policy):
    """The oracle: knows every later touch. What is prefetched again before it is used costs nothing to give up; otherwise
    the key whose next use is furthest away goes. No policy that must admit what it is given has fewer misses.

    `uses` and `prefetches`: per key, the rising moments at which it is used or prefetched. `at(moment)` sets the clock.
    """

    name = "belady"

    def __init__(
        self, uses: Mapping[Key, Sequence[int]], prefetches: Mapping[Key, Sequence[int]] | None = None
    ) -> None:
        self._uses = uses
        self._prefetches = prefetches or {}
        self._resident: dict[Key, None] = {}
        self._now = -1

    def at(self, moment: int) -> None:
        self._now = moment

    def used(self, key: Key, score: float = 0.0) -> None:
        self._resident.setdefault(key)

    prefetched = used

    def removed(self, key: Key) -> None:
        self._resident.pop(key, None)

    def order(self) -> Iterable[Key]:
        return sorted(self._resident, key=self._regret, reverse=True)

    def victim(self, free: Free) -> Key | None:
        return max((key for key in self._resident if free(key)), key=self._regret, default=None)

    def _regret(self, key: Key) -> float:
        """The moment at which giving up this key is regretted."""
        use = self._next(self._uses, key)
        return float("inf") if self._next(self._prefetches, key) < use else use

    def _next(self, moments: Mapping[Key, Sequence[int]], key: Key) -> float:
        known = moments.get(key, ())
        place = bisect_right(known, self._now)
        return known[place] if place < len(known) else float("inf")


POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (LeastStale, LRU, LRUTouch, LFU, FIFO, GateScore)}


def policy_named(name: str) -> Policy:
    """A fresh policy. The oracle is not among them: it needs to be told the future."""
    if name not in POLICIES:
        raise UsageError(f"no eviction policy called {name!r}", hint="one of " + ", ".join(POLICIES))
    return POLICIES[name]()
