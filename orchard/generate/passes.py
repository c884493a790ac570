"""A batch of prompts run in step, over any runner's slots: for benchmarks and comparisons, which need no engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchard.generate.protocol import Held, Slots, Use, Work


class SlotsPass:
    """See `protocol.Pass`."""

    def __init__(
        self, slots: Slots, prompts: Sequence[Sequence[int]], length: int, held: Sequence[Use | None] = ()
    ) -> None:
        """`slots`: of nobody else's, and as many as there are prompts."""
        self.lengths = [len(prompt) for prompt in prompts]
        self.longest = max(self.lengths)
        self._slots = slots
        self._prompts = [list(prompt) for prompt in prompts]
        self._rows = list(range(len(prompts)))
        uses = [*held, *[None] * (len(prompts) - len(held))]
        self.starts = [slots.open(row, length, use) for row, use in enumerate(uses)]
        if reserve := getattr(slots, "reserve", None):
            for row in self._rows:
                reserve(row, length)
        self._first: list[np.ndarray | None] = [None] * len(prompts)

    def read(self, start: int, stop: int) -> None:
        work, ends = [], []
        for row, slot in enumerate(self._rows):
            prompt, begin = self._prompts[row], max(start, self.starts[row])
            end = min(stop, len(prompt))
            if begin < end:
                ends.append((row, end == len(prompt)))
                work.append(Work(slot, prompt[begin:end], int(end == len(prompt)), prompt=True))
        for (row, ended), scores in zip(ends, self._slots.run(work) if work else (), strict=True):
            if ended:
                self._first[row] = scores.copy()

    def first(self) -> np.ndarray:
        found, self._first = [scores for scores in self._first if scores is not None], []
        return found[0] if len(found) == 1 else np.concatenate(found)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        return self._more([(token,) for token in ids])

    def extend(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        return self._more(tokens)

    def hold(self, row: int, tokens: int) -> Held | None:
        return self._slots.hold(self._rows[row], tokens)

    def keep(self, rows: Sequence[int]) -> None:
        for row, slot in enumerate(self._rows):
            if row not in rows:
                self._slots.close(slot)
        self._rows = [self._rows[row] for row in rows]
        self._prompts = [self._prompts[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]
        self._first = [self._first[row] for row in rows] if self._first else []

    def _more(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        scores = self._slots.run([Work(slot, ids, 1) for slot, ids in zip(self._rows, tokens, strict=True)])
        self.lengths = [length + len(ids) for length, ids in zip(self.lengths, tokens, strict=True)]
        if len(scores) == 1:
            return scores[0]
        table = scores[0].base  # one table of the runner's, in most cases: no need to copy it
        if table is not None and table.ndim == 2 and len(table) == len(scores) and scores[-1].base is table:
            return table
        return np.concatenate(scores)


def all_scores(slots: Slots, ids: Sequence[int], vocab: int, chunk: int) -> np.ndarray:
    """Read one text as a prompt, in chunks, into slot 0; the scores after each of its tokens: float32 [T, V]."""
    scores = np.empty((len(ids), vocab), np.float32)
    slots.open(0, len(ids))
    for at in range(0, len(ids), chunk):
        part = list(ids[at : at + chunk])
        scores[at : at + len(part)] = slots.run([Work(0, part, len(part), prompt=True)])[0]
    return scores
