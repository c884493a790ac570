"""Sequences that come and go on a GPU: the `Slots` of `orchard.generate.protocol` over paged stores.

Tokens of answers go through recorded graphs, all rows of a call in one. Tokens of prompts are read in tiles of one sequence, up
to `CHUNK` at a time. Both ways are the same arithmetic but for the number of rows in a product: one row is multiplied in
float32, more rows in bfloat16. A token's scores may therefore differ in their last bits with the company it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from orchard.core.errors import ContextOverflow, UsageError
from orchard.generate.cuda.graphs import LARGEST, Graphs, best_of
from orchard.generate.cuda.pages import PagedStores
from orchard.generate.cuda.program import Call, Program
from orchard.ops.kernels.triton.rows import PAGE, TILE, Rows, tiles_of

if TYPE_CHECKING:
    from orchard.generate.cuda.runner import CudaRunner
    from orchard.generate.protocol import Held, Use, Work

CHUNK = 512
"""Rows of one call."""


class CudaSlots:
    """Stores for up to `count` sequences. One caller at a time."""

    goes_back = True
    copies = True

    def __init__(self, runner: CudaRunner, count: int, pages: int) -> None:
        plan, device = runner.plan, runner.device
        self.count = count
        self.lengths = [0] * count
        self._runner = runner
        self._stores = PagedStores(plan.stores, count, plan.context, pages, device)
        self._room = [0] * count
        """Tokens that an open slot was promised; 0: free."""
        self._programs: list[Program | None] = [None] * count
        """What each open slot runs: its variant's, also after that was dropped."""
        self._read: list[tuple[np.ndarray, Tensor]] = []
        """What the head read in the last run, and for which slots."""
        self._landing: Tensor | None = None
        self._used = 0
        self._buffers: dict[Program, list[Tensor]] = {}
        self._graphs: dict[Program, Graphs] = {}

    # Coming and going ---------------------------------------------------------------------------------------------

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        """Beginnings that are kept in the memory of the CPU are not brought here: they are read again, which is quick."""
        if not 0 <= slot < self.count or self._room[slot]:
            raise UsageError(f"slot {slot} is not free", hint=f"use a free one from 0 to {self.count - 1}")
        if not 0 < length <= self._runner.plan.context:
            raise ContextOverflow(tokens=length, limit=self._runner.plan.context)
        program = self._runner.program(variant)
        self._stores.open(slot, length)
        self._room[slot], self.lengths[slot], self._programs[slot] = length, 0, program
        return 0

    def copy(self, source: int, target: int, tokens: int) -> bool:
        for slot in (source, target):
            self._open(slot)
        same = self._programs[source] is self._programs[target]
        if not (same and self.lengths[target] < tokens <= min(self.lengths[source], self._room[target])):
            return False
        self._stores.share(source, target, tokens)
        self.lengths[target] = tokens
        return True

    def back(self, slot: int, tokens: int) -> None:
        self._open(slot)
        if not 0 <= tokens <= self.lengths[slot]:
            raise UsageError(
                f"slot {slot} holds {self.lengths[slot]} tokens, not {tokens}", hint="go back, not forward"
            )
        self.lengths[slot] = tokens

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def close(self, slot: int) -> None:
        if 0 <= slot < self.count and self._room[slot]:
            self._stores.close(slot)
            program = self._programs[slot]
            self._room[slot], self.lengths[slot], self._programs[slot] = 0, 0, None
            if program and program not in self._programs and not self._runner.has(program):
                self._buffers.pop(program, None)  # the last of a variant that was dropped
                self._graphs.pop(program, None)

    def nbytes(self, length: int) -> int:
        return -(-length // PAGE) * self._stores.bytes_per_page

    @property
    def used(self) -> int:
        """Bytes of memory that all sequences have now."""
        return self._stores.used * self._stores.bytes_per_page

    @property
    def free_bytes(self) -> int:
        """Memory that no sequence has."""
        return self._stores.free * self._stores.bytes_per_page

    # Running ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.empty(0)] * len(work)
        for places in self._by_variant(work):
            scores = self._forward([work[place] for place in places], best=False)
            ends = np.cumsum([work[place].wanted for place in places])
            for place, end in zip(places, ends):
                found[place] = scores[end - work[place].wanted : end]
        return found

    @torch.inference_mode()
    def greedy(self, work: Sequence[Work]) -> list[int]:
        """The best next token after each one's last, -1 where scores are broken: those of the vocabulary stay on the device."""
        found = [0] * len(work)
        for places in self._by_variant(work):
            best = self._forward([work[place] for place in places], best=True).tolist()
            end = 0
            for place in places:
                end += max(1, work[place].wanted)
                found[place] = best[end - 1]
        return found

    def greedy_many(self, work: Sequence[Work], steps: int) -> list[list[int]]:
        """So many best tokens of each, one after another: the first follows the token that is given, each is read before the next
        is chosen, and the last is not read yet. For requests whose tokens no rule changes: the CPU is asked only at the end."""
        if steps < 1:
            raise UsageError(f"{steps} steps", hint="ask for at least one")
        device = self._runner.device
        alone = all(len(one.tokens) == 1 for one in work) and len({self._programs[one.slot] for one in work}) == 1
        if device.type == "cuda" and alone and len(work) <= LARGEST:
            return self._burst(work, steps)
        best = self.greedy(work)
        found = [[token] for token in best]
        for _ in range(steps - 1):
            best = self.greedy([replace(one, tokens=[max(token, 0)]) for one, token in zip(work, best, strict=True)])
            for tokens, token in zip(found, best, strict=True):
                tokens.append(token)
        return found

    @torch.inference_mode()
    def _burst(self, work: Sequence[Work], steps: int) -> list[list[int]]:
        for one in work:
            stop = self.lengths[one.slot] + steps
            if stop > self._room[one.slot]:
                raise UsageError(
                    f"slot {one.slot} has room for {self._room[one.slot]} tokens and would hold {stop}",
                    hint="ask for fewer steps, or open slots for as many tokens as will come",
                )
            if self._stores.shared:
                self._stores.own(one.slot, self.lengths[one.slot], stop)
        self._by_variant(work)
        program = self._ready(work[0].slot)
        tokens, slots = (np.array(values) for values in ([o.tokens[0] for o in work], [o.slot for o in work]))
        positions = np.array([self.lengths[one.slot] for one in work])
        self._check(tokens)
        best = self._graphs[program].burst(tokens, slots, positions, steps)
        for one in work:
            self.lengths[one.slot] += steps
        columns: list[list[int]] = best.T.tolist()
        return columns

    def hidden(self, slot: int) -> np.ndarray | None:
        for slots, read in reversed(self._read):
            found = np.flatnonzero(slots == slot)
            if len(found):
                row: np.ndarray = self._runner.program(None).head_input(read[int(found[-1])]).cpu().numpy()
                return row
        return None

    def _by_variant(self, work: Sequence[Work]) -> list[list[int]]:
        """Places of work of the same program, after everything about it was checked and its pages are its own."""
        groups: dict[Program | None, list[int]] = {}
        for place, one in enumerate(work):
            slot, count = one.slot, len(one.tokens)
            self._open(slot)
            start = self.lengths[slot]
            if not count or start + count > self._room[slot] or not 0 <= one.wanted <= count:
                raise UsageError(
                    f"slot {slot} has room for {self._room[slot]} tokens and would hold {start + count}",
                    hint="give at least one token, and open slots for as many as will come",
                )
            if self._stores.shared:
                self._stores.own(slot, start, start + count)
            groups.setdefault(self._programs[slot], []).append(place)
        self._read.clear()
        self._used = 0
        return list(groups.values())

    def _forward(self, work: Sequence[Work], best: bool) -> np.ndarray:
        """Scores of all wanted rows [W, V], or the best token of each [W]; with `best` at least one of every slot."""
        counts = [len(one.tokens) for one in work]
        wanted = [one.wanted or int(best) for one in work]
        tokens = np.array([token for one in work for token in one.tokens], np.int64)
        self._check(tokens)
        apart = len(tokens) == len(work)
        slots, positions = (
            np.array([one.slot for one in work]),
            np.array([self.lengths[one.slot] for one in work]),
        )
        rows = np.arange(len(work))
        if not apart:
            ends = np.cumsum(counts)
            slots = np.repeat(slots, counts)
            positions = np.arange(len(tokens)) + np.repeat(positions - (ends - counts), counts)
        if not apart or 0 in wanted:
            rows = np.concatenate([np.arange(end - many, end) for end, many in zip(np.cumsum(counts), wanted)])
        program = self._ready(work[0].slot)
        parts = []
        for at in range(0, len(tokens), CHUNK):
            part = slice(at, at + CHUNK)
            inside = rows[(rows >= at) & (rows < at + CHUNK)] - at
            arrays = (tokens[part], slots[part], positions[part])
            parts.append(self._call(program, *arrays, inside, prompt=work[0].prompt, best=best, apart=apart))
        for one in work:
            self.lengths[one.slot] += len(one.tokens)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _call(
        self,
        program: Program,
        tokens: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        *,
        prompt: bool,
        best: bool,
        apart: bool,
    ) -> np.ndarray:
        """One call of up to CHUNK rows."""
        if program.device.type == "cuda" and len(tokens) <= LARGEST and not prompt:
            done = self._graphs[program].step(tokens, slots, positions, apart)
            scores, read = done.best if best else done.scores, done.read
            if len(wanted) == len(tokens):
                scores, read = scores[: len(tokens)], read[: len(tokens)]
            else:
                index = torch.from_numpy(wanted).to(program.device)
                scores, read = scores[index], read[index]
        else:
            call = self._eager(program, tokens, slots, positions, wanted)
            program.run(call)
            if not len(wanted) or call.scores is None or call.read is None:
                return np.empty((0, program.plan.vocab), np.float32)
            scores, read = best_of(call.scores) if best else call.scores, call.read
        self._read.append((slots[wanted], read))
        return self._landed(scores)

    def _eager(
        self,
        program: Program,
        tokens: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
    ) -> Call:
        firsts, sizes = tiles_of(slots, TILE)
        sent = np.concatenate([tokens, slots, positions, firsts, sizes]).astype(np.int32)
        there = torch.from_numpy(sent).to(program.device)
        parts = there.split([len(tokens)] * 3 + [len(firsts)] * 2)
        rows = Rows(parts[0], parts[1], parts[2], parts[3], parts[4], tile=TILE)
        everything = len(wanted) == len(tokens)
        return Call(
            rows=rows,
            buffers=[buffer[: len(tokens)] for buffer in self._buffers[program]],
            pages=self._stores.layers,
            wanted=None if everything else torch.from_numpy(wanted).to(program.device),
        )

    def _ready(self, slot: int) -> Program:
        """The program of a slot, with buffers and graphs made for it."""
        program = self._programs[slot]
        assert program is not None
        if program not in self._buffers:
            self._buffers[program] = program.buffers(max(CHUNK, LARGEST))
            if program.device.type == "cuda":
                self._graphs[program] = Graphs(program, self._stores, self._buffers[program])
        return program

    def _check(self, tokens: np.ndarray) -> None:
        if tokens.min() < 0 or tokens.max() >= self._runner.plan.vocab:
            raise UsageError("a token id is outside the vocabulary", hint="encode with this model's own tokenizer")

    def _landed(self, table: Tensor) -> np.ndarray:
        """A table on the CPU, until the next run. Scores come through memory that the device writes to by itself, which is
        several times quicker."""
        if table.device.type != "cuda" or table.dtype != torch.float32:
            found: np.ndarray = table.cpu().numpy()
            return found
        if self._landing is None or self._used + table.numel() > len(self._landing):
            # What an earlier part of this run returned keeps the old memory.
            size = max(1, table.numel(), 2 * len(self._landing) if self._landing is not None else 0)
            self._landing, self._used = torch.empty(size).pin_memory(), 0
        place = self._landing[self._used : self._used + table.numel()].view(table.shape)
        self._used += table.numel()
        place.copy_(table, non_blocking=True)
        torch.cuda.current_stream(table.device).synchronize()
        landed: np.ndarray = place.numpy()
        return landed

    def _open(self, slot: int) -> None:
        if not 0 <= slot < self.count or not self._room[slot]:
            raise UsageError(f"slot {slot} is not open", hint="open it before anything is read into it")
