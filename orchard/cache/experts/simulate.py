"""Replay a trace over policies, prefetchers and capacities: the books of the engine, without its bytes.

Every pass runs the layers in order. Before the first layer, and while each layer computes, the prefetcher hears of the
layers ahead; then the next layer asks for its units. All units of a layer are asked for at once and held while it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchard.cache.experts.counters import Counters
from orchard.cache.experts.errors import BudgetTooSmall
from orchard.cache.experts.link import Hardware, Link
from orchard.cache.experts.policies import Belady, Key, Policy, policy_named
from orchard.cache.experts.prefetch import Guess, Nothing, Prefetcher
from orchard.cache.experts.table import Table
from orchard.cache.experts.trace import Trace

ORACLE = Belady.name


@dataclass(frozen=True)
class Event:
    """One layer of a pass: what is expected (before it runs), then what it needs."""

    begins: bool
    """Whether a pass begins here."""
    needs: tuple[int, dict[int, float]] | None
    """The layer and its units with their scores; None before the first layer."""
    expects: list[tuple[int, list[tuple[int, float]]]]
    """What to read ahead afterwards: layers, and units with their scores."""


@dataclass
class Outcome:
    """What a replay counted."""

    policy: str
    prefetch: str
    capacity: int
    counters: Counters
    seconds: float
    """Of the whole trace on the simulated hardware."""
    first: float
    """Until the prompt (the first `prompt` passes) was read: the time to the first token."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "prefetch": self.prefetch,
            "capacity": self.capacity,
            "seconds": self.seconds,
            "ttft": self.first,
            **self.counters.to_dict(),
        }


@dataclass
class Replay:
    """A trace as a prefetcher turns it into events, ready for any number of policies and capacities."""

    trace: Trace
    prefetcher: Prefetcher = field(default_factory=Nothing)
    hardware: Hardware = field(default_factory=Hardware)
    prompt: int = 32

    def __post_init__(self) -> None:
        self.events = list(_events(self.trace, self.prefetcher))
        self.working_set = max(len(event.needs[1]) for event in self.events if event.needs is not None)
        sizes = in_flight(self.events)
        self.in_flight = int(np.percentile(sizes, 90, method="higher"))
        """The in-flight set at nine moments of ten: a cache should hold it."""
        self.most_in_flight = max(sizes)

    @property
    def nominal(self) -> int:
        """The in-flight set by the prefetcher's numbers, as if gates never changed their minds as they come nearer."""
        return self.prefetcher.in_flight(self.working_set)

    def run(self, policy: str, capacity: int) -> Outcome:
        if capacity < self.working_set:
            raise BudgetTooSmall(
                budget=capacity, needed=self.working_set, what="the units of one layer (counted in units)"
            )
        chosen = self._oracle() if policy == ORACLE else policy_named(policy)
        table, link = Table(capacity, chosen), Link(self.hardware.transfer)
        now = first = 0.0
        for moment, event in enumerate(self.events):
            if isinstance(chosen, Belady):
                chosen.at(moment)
            if event.begins:
                if table.counters.passes == self.prompt:
                    first = now
                table.begin_pass()
            if event.needs is not None:
                now = self._need(table, link, *event.needs, now)
            for layer, units in event.expects:
                self._expect(table, link, layer, units, now)
            if event.needs is not None:
                now += self.hardware.compute
        passes = table.counters.passes
        return Outcome(
            policy, self.prefetcher.name, capacity, table.counters, now, first if passes > self.prompt else now
        )

    def sweep(self, policies: Sequence[str], capacities: Sequence[int]) -> list[Outcome]:
        return [self.run(policy, capacity) for policy in policies for capacity in capacities]

    def _need(self, table: Table, link: Link, layer: int, units: dict[int, float], now: float) -> float:
        for key in table.need(layer, units, units):
            admitted = table.admit(key, units[key[1]])
            assert admitted is not None  # the capacity holds a layer
            if admitted.evicted is not None:
                link.cancel(admitted.evicted, now)
            link.ask(key, now, ahead=False)
            table.counters.reads += 1
        there = link.wait([(layer, unit) for unit in units], now)
        table.counters.waited += there - now
        return there

    def _expect(self, table: Table, link: Link, layer: int, units: list[tuple[int, float]], now: float) -> None:
        scores = dict(units)
        for key in table.expect(layer, list(scores), scores):
            admitted = table.admit(key, scores[key[1]], ahead=True)
            if admitted is None:
                return
            if admitted.evicted is not None:
                link.cancel(admitted.evicted, now)
            link.ask(key, now, ahead=True)
            table.counters.reads += 1

    def _oracle(self) -> Policy:
        """A policy that knows all events. At one moment a layer's needs come before what is expected after them."""
        uses: dict[Key, list[int]] = defaultdict(list)
        prefetches: dict[Key, list[int]] = defaultdict(list)
        for moment, event in enumerate(self.events):
            if event.needs is not None:
                for unit in event.needs[1]:
                    uses[event.needs[0], unit].append(moment)
            for layer, units in event.expects:
                for unit, _ in units:
                    prefetches[layer, unit].append(moment)
        return Belady(uses, prefetches)


def _events(trace: Trace, prefetcher: Prefetcher) -> Iterator[Event]:
    previous: list[dict[int, float]] = [{} for _ in range(trace.layers)]
    for rows in trace.by_pass():
        needs = [_sum(trace.chosen[rows, layer], trace.scores[rows, layer]) for layer in range(trace.layers)]
        for point in range(-1, trace.layers):
            expects = [
                (guess.layer, prefetcher.choose(guess)) for guess in _guesses(trace, rows, point, prefetcher, previous)
            ]
            yield Event(point < 0, None if point < 0 else (point, needs[point]), expects)
        previous = needs


def in_flight(events: Sequence[Event]) -> list[int]:
    """How many units each moment wants in memory: those of the running layer, and those read ahead for layers to come. A layer's
    gate may guess otherwise the nearer it comes, so this is more than one set of guesses for each layer."""
    sizes: list[int] = []
    ahead: set[Key] = set()
    for event in events:
        running: set[Key] = set()
        if event.begins:
            ahead = set()
        if event.needs is not None:
            layer, units = event.needs
            ahead = {key for key in ahead if key[0] > layer}
            running = {(layer, unit) for unit in units}
        ahead.update((layer, unit) for layer, units in event.expects for unit, _ in units)
        sizes.append(len(ahead | running))
    return sizes


def _guesses(
    trace: Trace, rows: slice, point: int, prefetcher: Prefetcher, previous: list[dict[int, float]]
) -> Iterator[Guess]:
    tokens = rows.stop - rows.start
    for distance in range(1, prefetcher.lookahead + 1):
        layer = point + distance
        if layer >= trace.layers:
            return
        ranked: list[tuple[int, float]] = []
        if prefetcher.asks_gates and distance <= trace.lookahead:
            guesses = trace.ahead[rows, layer, distance - 1], trace.ahead_scores[rows, layer, distance - 1]
            ranked = sorted(_sum(*guesses).items(), key=lambda item: -item[1])
        yield Guess(layer, distance, min(trace.k * tokens, trace.experts), ranked, list(previous[layer]))


def _sum(units: np.ndarray, scores: np.ndarray) -> dict[int, float]:
    """Units of some tokens together, in the order in which they first appear; -1 is nobody."""
    found: dict[int, float] = {}
    for unit, score in zip(units.reshape(-1).tolist(), scores.reshape(-1).tolist(), strict=True):
        if unit >= 0:
            found[unit] = found.get(unit, 0.0) + score
    return found
