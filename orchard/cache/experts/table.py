"""The books of a cache of units: who is in which slot, who may go, what was counted. No bytes move here.

The engine (`resident.py`) and the simulator (`simulate.py`) keep the same books, so what is simulated is what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchard.cache.experts.counters import Counters
from orchard.cache.experts.policies import Key, Policy

NO_SCORES: Mapping[int, float] = {}


@dataclass(frozen=True)
class Admitted:
    """A slot was found for a key; whoever was in it is gone."""

    key: Key
    slot: int
    evicted: Key | None


class Table:
    """`slots` places. What the running layer needs, and what is pinned, is never evicted."""

    busy: Callable[[Key], bool] | None = None
    """Says which keys cannot go for a reason of the owner's, such as a read under way."""

    def __init__(self, slots: int, policy: Policy) -> None:
        self.slots = slots
        self.policy = policy
        self.counters = Counters()
        self.slot: dict[Key, int] = {}
        self._vacant = list(range(slots))[::-1]
        self._running: frozenset[Key] = frozenset()
        self._pins: Counter[Key] = Counter()
        self._fetched: set[Key] = set()
        self._unused: set[Key] = set()

    def begin_pass(self) -> None:
        self.counters.passes += 1
        self._running = frozenset()
        self._fetched.clear()
        self.policy.begin_pass()

    def need(self, layer: int, units: Iterable[int], scores: Mapping[int, float] = NO_SCORES) -> list[Key]:
        """A layer runs with these units: they are held until the next layer runs. Returns the keys that are missing."""
        keys = [(layer, unit) for unit in dict.fromkeys(units)]
        self._running = frozenset(keys)
        missing = []
        for key in keys:
            if key in self.slot:
                self.counters.hits += 1
                self._unused.discard(key)
                self.policy.used(key, scores.get(key[1], 0.0))
            else:
                self.counters.misses += 1
                self.counters.collisions += key in self._fetched
                missing.append(key)
        return missing

    def rest(self) -> None:
        """No layer runs: nothing is held but what is pinned."""
        self._running = frozenset()

    def admit(self, key: Key, score: float = 0.0, *, ahead: bool = False) -> Admitted | None:
        """A slot for a key that is not resident, because it is needed or (`ahead`) because it may be. None: no slot is free."""
        evicted = None
        if not self._vacant:
            evicted = self.policy.victim(self._free)
            if evicted is None:
                return None
            self.counters.evictions += 1
            self.remove(evicted)
        slot = self.slot[key] = self._vacant.pop()
        self._fetched.add(key)
        if ahead:
            self.counters.prefetched += 1
            self._unused.add(key)
            self.policy.prefetched(key, score)
        else:
            self.policy.used(key, score)
        return Admitted(key, slot, evicted)

    def expect(self, layer: int, units: Sequence[int], scores: Mapping[int, float] = NO_SCORES) -> list[Key]:
        """These units may be needed soon. Returns the keys that are not resident."""
        missing = []
        for unit in dict.fromkeys(units):
            key = (layer, unit)
            if key in self.slot:
                self.policy.prefetched(key, scores.get(unit, 0.0))
            else:
                missing.append(key)
        return missing

    def remove(self, key: Key) -> None:
        self._vacant.append(self.slot.pop(key))
        self.counters.wasted += key in self._unused
        self._unused.discard(key)
        self.policy.removed(key)

    def pin(self, keys: Iterable[Key]) -> None:
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        self._pins.subtract(keys)
        self._pins = +self._pins

    def pinned_with(self, keys: Iterable[Key]) -> int:
        """How many keys would be pinned if these were, too."""
        return len(self._pins.keys() | set(keys))

    def resident(self, layer: int) -> list[int]:
        """Units of a layer that are there."""
        return sorted(unit for at, unit in self.slot if at == layer)

    def _free(self, key: Key) -> bool:
        return key not in self._running and key not in self._pins and not (self.busy is not None and self.busy(key))
