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
from heapq import heapify, heappop, heappush
from math import inf, log2

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

    def released(self, key: Key) -> None:  # noqa: B027
        """The layer that used this key has ended: until now it was in use."""

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
    """The least recently used goes; a key is in use until its layer has ended. A prefetch does not count as use."""

    name = "lru"

    def used(self, key: Key, score: float = 0.0) -> None:
        self._last(key)

    def released(self, key: Key) -> None:
        self._last(key)

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._row.setdefault(key)


class LRUTouch(LRU):
    """LRU for which a prefetch counts as use."""

    name = "lru-touch"

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._last(key)


class _Ranking:
    """Keys by a number that changes only when they are touched, the least first; what no longer holds is skipped."""

    def __init__(self) -> None:
        self.values: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], Key]] = []
        self._touches = 0

    def put(self, key: Key, value: float, *, keep_place: bool = True) -> None:
        """`keep_place`: among equals a key stands where it first came."""
        self._touches += 1
        old = self.values.get(key)
        place = old[1] if old is not None and keep_place else self._touches
        if old != (value, place):
            self.values[key] = value, place
            heappush(self._heap, ((value, place), key))

    def remove(self, key: Key) -> None:
        self.values.pop(key, None)

    def least(self, free: Free) -> Key | None:
        held, found = [], None
        while self._heap and found is None:
            entry = heappop(self._heap)
            if self.values.get(entry[1]) == entry[0]:
                held.append(entry)
                found = entry[1] if free(entry[1]) else None
        for entry in held:
            heappush(self._heap, entry)
        return found

    def order(self) -> list[Key]:
        return sorted(self.values, key=self.values.__getitem__)


class _Ranked(Policy):
    """The least by some number goes; subclasses say by which."""

    def __init__(self) -> None:
        self._ranking = _Ranking()

    def removed(self, key: Key) -> None:
        self._ranking.remove(key)

    def order(self) -> Iterable[Key]:
        return self._ranking.order()

    def victim(self, free: Free) -> Key | None:
        return self._ranking.least(free)


class LFU(_Ranked):
    """The least often used goes; the earlier one among equals. Counts outlive residence."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[Key, int] = {}

    def used(self, key: Key, score: float = 0.0) -> None:
        self._count[key] = self._count.get(key, 0) + 1
        self._ranking.put(key, self._count[key])

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._ranking.put(key, self._count.get(key, 0))


class GateScore(_Ranked):
    """The lowest router score goes: the last one seen of each key, halved at every pass in which it was not seen."""

    name = "gate-score"

    def __init__(self) -> None:
        super().__init__()
        self._pass = 0

    def begin_pass(self) -> None:
        self._pass += 1

    def used(self, key: Key, score: float = 0.0) -> None:
        # All scores fade alike, so their order is that of what they were and when.
        self._ranking.put(key, log2(max(score, 1e-30)) + self._pass)

    prefetched = used


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


class LFUAhead(Policy):
    """The least often used goes, but nothing that was fetched for this pass and is still to be used. Counts fade by 2 % a pass.

    LFU keeps what is popular, and throws out what was prefetched, which has never been used. This one keeps both: our own rule,
    for caches that hold more than one pass needs.
    """

    name = "lfu-ahead"
    fading = 0.98

    def __init__(self) -> None:
        self._count: dict[Key, float] = {}
        self._weight = 1.0  # of a use now: it grows instead of all counts falling
        self._resident: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}
        self._heap: list[tuple[float, Key]] = []  # entries that no longer hold are skipped

    def begin_pass(self) -> None:
        self._waiting.clear()
        self._weight /= self.fading
        if self._weight > 1e100:
            self._count = {key: count / self._weight for key, count in self._count.items()}
            self._weight = 1.0
            self._heap = [(self._count.get(key, 0.0), key) for key in self._resident]
            heapify(self._heap)

    def used(self, key: Key, score: float = 0.0) -> None:
        self._waiting.pop(key, None)
        self._resident.setdefault(key)
        self._count[key] = self._count.get(key, 0.0) + self._weight
        heappush(self._heap, (self._count[key], key))

    def prefetched(self, key: Key, score: float = 0.0) -> None:
        self._waiting.setdefault(key)
        if key not in self._resident:
            self._resident[key] = None
            heappush(self._heap, (self._count.get(key, 0.0), key))

    def removed(self, key: Key) -> None:
        self._resident.pop(key, None)
        self._waiting.pop(key, None)

    def order(self) -> Iterable[Key]:
        return sorted(self._resident, key=lambda key: (key in self._waiting, self._count.get(key, 0.0), key))

    def victim(self, free: Free) -> Key | None:
        held = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            key = entry[1]
            if key in self._resident and self._count.get(key, 0.0) == entry[0]:
                held.append(entry)
                found = key if key not in self._waiting and free(key) else None
        for entry in held:
            heappush(self._heap, entry)
        # What is needed last goes first where everything is waited for.
        return found if found is not None else next((key for key in reversed(self._waiting) if free(key)), None)


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
        self._regrets: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []  # the furthest first; entries that no longer hold are skipped
        self._now = -1

    def at(self, moment: int) -> None:
        self._now = moment

    def used(self, key: Key, score: float = 0.0) -> None:
        """What is regretted changes only when a key is touched, so it is looked up once a touch."""
        use = self._next(self._uses, key)
        regret = inf if self._next(self._prefetches, key) < use else use
        if self._regrets.get(key) != regret:
            self._regrets[key] = regret
            heappush(self._heap, (-regret, key))

    prefetched = used

    def removed(self, key: Key) -> None:
        self._regrets.pop(key, None)

    def order(self) -> Iterable[Key]:
        return sorted(self._regrets, key=lambda key: -self._regrets[key])

    def victim(self, free: Free) -> Key | None:
        held = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            if self._regrets.get(entry[1]) == -entry[0]:
                held.append(entry)
                found = entry[1] if free(entry[1]) else None
        for entry in held:
            heappush(self._heap, entry)
        return found

    def _next(self, moments: Mapping[Key, Sequence[int]], key: Key) -> float:
        known = moments.get(key, ())
        place = bisect_right(known, self._now)
        return known[place] if place < len(known) else inf


POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (LeastStale, LFUAhead, LRU, LRUTouch, LFU, FIFO, GateScore)
}


def policy_named(name: str) -> Policy:
    """A fresh policy. The oracle is not among them: it needs to be told the future."""
    if name not in POLICIES:
        raise UsageError(f"no eviction policy called {name!r}", hint="one of " + ", ".join(POLICIES))
    return POLICIES[name]()
