"""Slots of the native engine: sequences that come and go in one set of stores, run together in one call.

Rows of different variants (other weights over the same stores) go in a call of their own each. A plan with steps in torch is run
sequence by sequence, and an answer's tokens one by one, because what torch computes may depend on how much it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from orchard.generate.mixed import Mixed
from orchard.generate.protocol import Held, Use, Work
from orchard.ops.kernels.native.program import BLOCK, CHUNK
from orchard.ops.plan.steps import Head, Narrow

if TYPE_CHECKING:
    from orchard.generate.native import NativeRunner

NOTHING = np.empty(0, np.int32)
MANY = 64
"""Rows of scores that are kept from call to call; more are given back when they are not needed."""


class NativeSlots:
    """See `protocol.Slots`."""

    goes_back = True

    def __init__(self, runner: NativeRunner, count: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self._runner = runner
        self.copies = runner.plan.whole
        self._rings = any(store.keep for store in runner.plan.stores)
        self._stores = runner.program.stores(count, 0)
        self._runners: list[NativeRunner | None] = [None] * count  # None: the slot is free
        self._mixed: dict[int, Mixed] = {}
        self._prompts: list[list[int]] = [[] for _ in range(count)]  # what has been read of each
        self._uses: list[Use | None] = [None] * count
        self._scores = np.empty((1, runner.plan.vocab), np.float32)
        self._ran: list[tuple[NativeRunner, Sequence[Work]]] = []  # the calls of the last run
        self._sizes: dict[int, int] = {}

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        if self._runners[slot] is not None:
            raise ValueError(f"slot {slot} is not free")
        runner = self._runner.variant(variant)
        self._stores.open(slot, length)
        self._runners[slot] = runner
        self.lengths[slot], self._prompts[slot], self._uses[slot] = 0, [], None
        try:
            if not runner.plan.whole:
                self._mixed[slot] = Mixed(runner, length)
            elif use is not None:
                self._stores.put(slot, use.tokens, use.held.data, len(use.held.ids))
                self._prompts[slot] = list(use.held.ids[: use.tokens])
                self._uses[slot] = use
                self.lengths[slot] = use.tokens
        except BaseException:
            self.close(slot)
            raise
        return self.lengths[slot]

    def reserve(self, slot: int, tokens: int) -> None:
        """Memory for tokens that are sure to come: taken at once, nothing has to be copied when it grows."""
        if slot not in self._mixed:
            self._stores.reserve(slot, tokens)

    def copy(self, source: int, target: int, tokens: int) -> bool:
        prompt, fits = self._prompts[source], self._runners[source] is self._runners[target]
        if not fits or self._mixed or not self.lengths[target] < tokens <= len(prompt):
            return False
        if not self._stores.copy(source, target, tokens):
            return False
        self.lengths[target], self._prompts[target] = tokens, prompt[:tokens]
        return True

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        wanted = sum([one.wanted for one in work])
        if wanted > len(self._scores) or len(self._scores) > max(4 * wanted, MANY):
            self._scores = np.empty((max(wanted, 1), self._scores.shape[1]), np.float32)
        self._ran.clear()
        first, at, found = self._runners[work[0].slot], 0, []
        if first is None:
            raise ValueError(f"slot {work[0].slot} is free")
        if first.plan.whole and {id(self._runners[one.slot]) for one in work} == {id(first)}:
            self._run(first, work, self._scores[:wanted])
            for one in work:
                found.append(self._scores[at : at + one.wanted])
                at += one.wanted
            return found
        return self._apart(work)

    def back(self, slot: int, tokens: int) -> None:
        if not 0 <= tokens <= self.lengths[slot]:
            raise ValueError(f"slot {slot} has {self.lengths[slot]} tokens and cannot go back to {tokens}")
        self.lengths[slot] = tokens
        del self._prompts[slot][tokens:]
        if slot in self._mixed:
            self._mixed[slot].back(tokens)

    def hold(self, slot: int, tokens: int) -> Held | None:
        prompt, use = self._prompts[slot], self._uses[slot]
        if slot in self._mixed or not 0 < tokens <= len(prompt):
            return None
        if self._rings and self.lengths[slot] > len(prompt):
            return None  # its rings have gone on with the answer
        if self._rings and tokens < self.lengths[slot] - CHUNK:
            return None
        known = use.held.data[: use.tokens // BLOCK] if use is not None and isinstance(use.held.data, tuple) else ()
        return Held(tuple(prompt[:tokens]), self._stores.take(slot, tokens, known), whole=self._rings)

    def hidden(self, slot: int) -> np.ndarray | None:
        for runner, work in reversed(self._ran):
            row = narrow = 0
            for one in work:
                row, narrow = row + len(one.tokens), narrow + one.wanted
                if one.slot == slot and one.wanted:
                    return _read_by_head(runner, row - 1, narrow - 1, sum(len(each.tokens) for each in work))
        return None

    def close(self, slot: int) -> None:
        self._runners[slot], self._uses[slot] = None, None
        self._mixed.pop(slot, None)
        self._stores.release(slot)
        self.lengths[slot], self._prompts[slot] = 0, []

    def nbytes(self, length: int) -> int:
        size = self._sizes.get(length)
        if size is None:
            size = self._sizes[length] = self._stores.memory(length)
        return size

    @property
    def used(self) -> int:
        """Bytes of memory that all sequences have now."""
        return self._stores.memory()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _apart(self, work: Sequence[Work]) -> list[np.ndarray]:
        """Several calls: one for each variant, and one for each sequence of a plan that needs torch."""
        found: list[np.ndarray] = [self._scores[:0]] * len(work)
        groups: dict[int, list[int]] = {}
        for place, one in enumerate(work):
            mixed = one.slot in self._mixed
            groups.setdefault(-1 - one.slot if mixed else id(self._runners[one.slot]), []).append(place)
        at = 0
        for places in groups.values():
            part = [work[place] for place in places]
            runner = self._runners[part[0].slot]
            if runner is None:
                raise ValueError(f"slot {part[0].slot} is free")
            wanted = sum(one.wanted for one in part)
            self._run(runner, part, self._scores[at : at + wanted])
            for place, one in zip(places, part, strict=True):
                found[place] = self._scores[at : at + one.wanted]
                at += one.wanted
        return found

    def _run(self, runner: NativeRunner, work: Sequence[Work], scores: np.ndarray) -> None:
        lengths, prompt = self.lengths, work[0].prompt
        if len(work) == len(scores) and not prompt and sum([len(one.tokens) for one in work]) == len(work):
            tokens = np.array([one.tokens[0] for one in work], np.int32)
            sequences = np.array([one.slot for one in work], np.int32)
            positions = np.array([lengths[one.slot] for one in work], np.int32)
            wanted = np.arange(len(work), dtype=np.int32)
        else:
            tokens, sequences, positions, wanted = self._rows(work)
        if not runner.plan.whole:
            self._mixed[work[0].slot].run(self._stores, tokens, sequences, positions, wanted, scores, prompt)
        else:
            self._call(runner, tokens, sequences, positions, wanted, scores, prompt)
        for one in work:
            lengths[one.slot] += len(one.tokens)
            if prompt:
                self._prompts[one.slot].extend(one.tokens)
        self._ran.append((runner, work))

    def _rows(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        counts = [len(one.tokens) for one in work]
        tokens = np.fromiter((token for one in work for token in one.tokens), np.int32, sum(counts))
        sequences = np.repeat(np.array([one.slot for one in work], np.int32), counts)
        places = [np.arange(self.lengths[one.slot], self.lengths[one.slot] + len(one.tokens)) for one in work]
        ends = np.cumsum(counts)
        wanted = [np.arange(end - one.wanted, end) for end, one in zip(ends, work, strict=True) if one.wanted]
        last = np.concatenate(wanted).astype(np.int32) if wanted else NOTHING
        return tokens, sequences, np.concatenate(places).astype(np.int32), last

    def _call(
        self,
        runner: NativeRunner,
        tokens: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        prompt: bool,
    ) -> None:
        if len(tokens) <= CHUNK:
            runner.program.run(self._stores, tokens, sequences, positions, wanted, scores, prompt=prompt)
            return
        for at in range(0, len(tokens), CHUNK):
            part = slice(at, at + CHUNK)
            first, last = np.searchsorted(wanted, (at, at + CHUNK))
            some = wanted[first:last] - np.int32(at)
            rows = (tokens[part], sequences[part], positions[part])
            runner.program.run(self._stores, *rows, some, scores[first:last], prompt=prompt)


def _read_by_head(runner: NativeRunner, row: int, narrow: int, rows: int) -> np.ndarray | None:
    """What the head read, normalised as it does, from the row it was left in."""
    head = next((step for step in runner.plan.steps if isinstance(step, Head)), None)
    if head is None or rows > CHUNK:
        return None
    place = narrow if any(isinstance(step, Narrow) for step in runner.plan.steps) else row
    x = np.array(runner.program.buffer(head.src, place + 1)[place], np.float32)
    if head.norm is None:
        return x
    weight = runner.plan.tensors[head.norm.tensor]
    scale = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2) + head.norm.eps)
    normal: np.ndarray = (x * np.float32(scale) * weight).astype(np.float32)
    return normal
