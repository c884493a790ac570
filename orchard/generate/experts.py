"""A plan whose experts live in a file of records: the native steps, and between them the experts that tokens chose.

Each layer chooses; what it chose and is not in memory begins to be read; experts that are there are computed meanwhile, then
the others. While a layer computes, the gates of the next layers are asked what they would choose now, and that is read too.
Every expert's result waits in a place of its own to be added up in the order of the choices, so the scores are, bit for bit,
those of the same plan with everything in memory. Shapes: N tokens, K chosen, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchard.cache.experts import Resident
from orchard.cache.experts.misses import Misses, Wait
from orchard.cache.experts.prefetch import Guess, NextGates, Prefetcher
from orchard.core.errors import UnsupportedPair
from orchard.generate.experts_ahead import Gates
from orchard.generate.experts_file import ARRAYS, check_records
from orchard.generate.experts_trace import Recorder
from orchard.ops.kernels.native.program import Program, Stores
from orchard.ops.plan.steps import Experts, Plan

ROUTE, COMPUTE, COMBINE = range(3)


class ExpertsProgram(Program):
    """`Program.run` with experts from a `Resident`. Calls take turns."""

    def __init__(
        self,
        plan: Plan,
        resident: Resident,
        *,
        prefetcher: Prefetcher | None = None,
        misses: Misses | None = None,
        threads: int | None = None,
        level: int = -1,
    ) -> None:
        if not plan.whole:
            raise UnsupportedPair(
                "experts cannot live elsewhere in a model with steps in torch", hint="load it without experts_budget"
            )
        self.places = [place for place, step in enumerate(plan.steps) if isinstance(step, Experts)]
        self.layers: list[Experts] = [plan.steps[place] for place in self.places]  # type: ignore[misc]
        check_records(resident.records, self.layers)
        self.resident = resident
        self.prefetcher = prefetcher or NextGates()
        self.misses = misses or Wait()
        self.recorder: Recorder | None = None
        self._gates = Gates(plan, self.layers)
        self._slots = np.full(max(step.gate.count for step in self.layers), -1, np.int32)
        self._previous: list[Sequence[int]] = [()] * len(self.layers)
        super().__init__(plan, threads=threads, level=level, homes=_homes(resident, self.layers))

    def run(
        self,
        stores: Stores,
        tokens: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        *,
        first: int = 0,
        last: int | None = None,
        prompt: bool = False,
    ) -> None:
        if first or last is not None:
            raise UnsupportedPair("a plan whose experts live elsewhere runs as a whole", hint="run all of its steps")
        rows: Any = (stores, tokens, sequences, positions, wanted, scores)
        with self.lock:
            self.resident.begin_pass()
            if self.recorder is not None:
                self.recorder.begin(len(tokens))
            try:
                at = 0
                if self.prefetcher.lookahead:  # the embeddings are known before the first layer chooses
                    super().run(*rows, first=0, last=1, prompt=prompt)
                    self._look_ahead(-1, self._gates.embedded(self, len(tokens)))
                    at = 1
                for layer, place in enumerate(self.places):
                    super().run(*rows, first=at, last=place, prompt=prompt)
                    self._layer(layer, place)
                    at = place + 1
                super().run(*rows, first=at, last=len(self.plan.steps), prompt=prompt)
                if self.recorder is not None:
                    self.recorder.end()
            finally:
                self.resident.rest()

    # Parts of a step --------------------------------------------------------------------------------------------------

    def part(self, step: int, part: int, slots: np.ndarray | None = None) -> None:
        """One part of a step whose experts live elsewhere, for the rows of the last run: 0 choose, 1 compute the experts that
        have a slot (int32 [experts], -1: none), 2 add up."""
        self._calls.orchard_engine_part(self._engine, step, part, None if slots is None else slots.ctypes.data)

    @property
    def rows(self) -> int:
        """Rows that the last run went on with."""
        return int(self._calls.orchard_engine_rows(self._engine))

    def choices(self, step: Experts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What part 0 left: experts [rows, k], weights [rows, k] and all probabilities [rows, experts]. Views."""
        rows, experts = self.rows, step.gate.count
        sizes = [rows * step.k, rows * step.k, rows * experts]
        address = self._calls.orchard_engine_choices(self._engine)
        words = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (sum(sizes),))
        chosen, weights, mass = np.split(words, np.cumsum(sizes)[:-1])
        shape = (rows, step.k)
        return (
            chosen.reshape(shape),
            weights.view(np.float32).reshape(shape),
            mass.view(np.float32).reshape(rows, experts),
        )

    def _layer(self, layer: int, place: int) -> None:
        step = self.layers[layer]
        self.part(place, ROUTE)
        chosen, weights, mass = self.choices(step)
        if not len(chosen):  # nobody wants the scores of these rows
            if self.recorder is not None:
                self.recorder.layer(layer, chosen, weights)
            return
        if not self.misses.exact:
            changed = self.misses.settle(chosen, weights, mass, self.resident.ready(layer))
            counters = self.resident.counters
            counters.skipped += changed if self.misses.name == "skip" else 0
            counters.substituted += changed if self.misses.name == "substitute" else 0
        if self.recorder is not None:
            self.recorder.layer(layer, chosen, weights)
        units, gains = _wanted(chosen, weights)
        self._previous[layer] = units
        room = self.resident.free
        for at in range(0, len(units), room):  # a prompt may want more than there is room for
            last = at + room >= len(units)
            self._some(layer, place, units[at : at + room], gains, ahead=last)
        self.part(place, COMBINE)

    def _some(self, layer: int, place: int, units: Sequence[int], gains: dict[int, float], *, ahead: bool) -> None:
        loading = self.resident.start(layer, units, gains)
        if ahead:
            step = self.layers[layer]
            self._look_ahead(layer, self.buffer(step.src, self.rows))
        waits = {unit for _, unit in loading.waits}
        self._compute(place, [pair for pair in zip(units, loading.slots, strict=True) if pair[0] not in waits])
        if waits:
            self.resident.finish(loading)
            self._compute(place, [pair for pair in zip(units, loading.slots, strict=True) if pair[0] in waits])

    def _compute(self, place: int, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        self._slots.fill(-1)
        for unit, slot in pairs:
            self._slots[unit] = slot
        self.part(place, COMPUTE, self._slots)

    def _look_ahead(self, layer: int, x: np.ndarray) -> None:
        """Begin to read what the layers after this one may want."""
        recorder, prefetcher = self.recorder, self.prefetcher
        reach = max(prefetcher.lookahead, 0 if recorder is None else recorder.lookahead)
        for distance in range(1, reach + 1):
            target = layer + distance
            if target >= len(self.layers) or not len(x):
                return
            asks = prefetcher.asks_gates and distance <= prefetcher.lookahead
            mass = self._gates.mass(target, x) if asks or recorder is not None else None
            if recorder is not None and mass is not None:
                recorder.guess(target, distance, mass)
            if distance > prefetcher.lookahead:
                continue
            k = min(self.layers[target].k * len(x), self.layers[target].gate.count)
            ranked = self._gates.ranked(target, mass) if asks and mass is not None else ()
            guess = Guess(target, distance, k, ranked, self._previous[target])
            # What is read ahead must not push out what is needed sooner.
            most = (self.resident.free - self.resident.table.running) // prefetcher.lookahead
            chosen = prefetcher.choose(guess)[: max(most, 0)]
            self.resident.prefetch(target, [unit for unit, _ in chosen], dict(chosen))


def _homes(resident: Resident, layers: Sequence[Experts]) -> dict[str, tuple[int, int]]:
    base = int(resident.pages.ctypes.data)
    return {
        getattr(step, name).tensor: (base + resident.records.layers[layer].arrays[name].at, resident.slot_bytes)
        for layer, step in enumerate(layers)
        for name in ARRAYS
    }


def _wanted(chosen: np.ndarray, weights: np.ndarray) -> tuple[list[int], dict[int, float]]:
    """The experts that some tokens want, and how much."""
    gains: dict[int, float] = {}
    for unit, weight in zip(chosen.reshape(-1).tolist(), weights.reshape(-1).tolist(), strict=True):
        gains[unit] = gains.get(unit, 0.0) + weight
    return list(gains), gains
