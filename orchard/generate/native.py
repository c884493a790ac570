"""A runner on the native engine: one call per step for all sequences, torch only where a plan says so.

Steps of a plan that have no native form (`Torch`) run between two native calls, on the rows that the first left in a
buffer. Then, and only then, torch and the model's modules are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.generate.protocol import Held, Use
from orchard.ops.kernels.native.program import CHUNK, Program
from orchard.ops.plan.file import to_json
from orchard.ops.plan.steps import Plan, Torch

if TYPE_CHECKING:
    from torch import nn

    Modules = Callable[[], nn.Module]


FEW = 8
"""Rows of one call (SMALL in kernels.h) that are computed exactly as one row would be."""


class NativeRunner:
    """Runs a checked plan. Safe to share between threads: calls take turns."""

    def __init__(
        self, plan: Plan, *, threads: int | None = None, decoder: Modules | None = None, level: int = -1
    ) -> None:
        """`decoder` gives the model that the plan was made from; it is asked only when the plan has `Torch` steps."""
        self.config = plan
        self.plan = plan
        self.program = Program(plan, threads=threads, level=level)
        self._decoder = decoder
        self._built: Any = None

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[Use | None] = ()) -> NativePass:
        return NativePass(self, prompts, length, held)

    def fits(self, held: Held) -> bool:
        """Whether these are as many bytes as so many tokens of this model take."""
        return self.plan.whole and held.nbytes == self.program.stores(1, 32).bytes(len(held.ids)) + 8 * len(held.ids)

    @cached_property
    def signature(self) -> str:
        """Tells keys and values of this model from those of any other: by its plan and samples of all its tensors."""
        known = sha256(json.dumps(to_json(self.plan), sort_keys=True).encode())
        for name, tensor in sorted(self.plan.tensors.items()):
            raw = tensor.reshape(-1).view(np.uint8)
            known.update(f"{name} {raw.size} ".encode() + raw[:256].tobytes() + raw[-256:].tobytes())
        return known.hexdigest()

    def scores(self, ids: Sequence[int]) -> np.ndarray:
        """Scores after every position of one text: float32 [T, V]."""
        run = NativePass(self, [ids], len(ids))
        return run.all_scores()

    @property
    def decoder(self) -> Any:
        if self._built is None:
            if self._decoder is None:
                raise ValueError("this plan has steps that run in torch, and no model was given for them")
            self._built = self._decoder()
        return self._built


class NativePass:
    """One run over a batch of prompts."""

    def __init__(
        self, runner: NativeRunner, prompts: Sequence[Sequence[int]], length: int, held: Sequence[Use | None] = ()
    ) -> None:
        self.lengths = [len(prompt) for prompt in prompts]
        self.longest = max(self.lengths)
        self._runner = runner
        self._program = runner.program
        self._prompts: Sequence[np.ndarray] = [np.asarray(prompt, np.int32) for prompt in prompts]
        self._sequences = np.arange(len(prompts), dtype=np.int32)
        self._stores = self._program.stores(len(prompts), length)
        self._scores = np.empty((len(prompts), runner.plan.vocab), np.float32)
        self._every = np.arange(len(prompts), dtype=np.int32)
        self._mixed = None if runner.plan.whole else Mixed(runner, len(prompts), length)
        self.starts = [0] * len(prompts)
        for row, use in enumerate(held if self._mixed is None else ()):
            if use is not None:
                self._stores.put(row, use.tokens, use.held.data, len(use.held.ids))
                self.starts[row] = use.tokens

    def read(self, start: int, stop: int) -> None:
        """Read tokens start … stop - 1 of every prompt that has them."""
        width = max(1, CHUNK // len(self._prompts))
        for at in range(start, min(stop, self.longest), width):
            self._read(at, min(at + width, stop, self.longest))

    def first(self) -> np.ndarray:
        self._prompts = ()
        return self._scores

    def step(self, ids: Sequence[int]) -> np.ndarray:
        positions = np.array(self.lengths, np.int32)
        self.lengths = [length + 1 for length in self.lengths]
        self._run(np.array(ids, np.int32), self._every, positions, self._every, self._scores)
        return self._scores

    def extend(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        rest = [list(ids) for ids in tokens]
        while sum(map(len, rest)) > max(FEW, len(rest)):
            row = max(range(len(rest)), key=lambda place: len(rest[place]))
            cut = min(FEW, len(rest[row]) - 1)
            self._append([row], [rest[row][:cut]], np.empty(0, np.int32), self._scores[:0])
            del rest[row][:cut]
        last = np.cumsum([len(ids) for ids in rest]).astype(np.int32) - 1
        self._append(range(len(rest)), rest, last, self._scores)
        return self._scores

    def hold(self, row: int, tokens: int) -> Held | None:
        """Before `first` only, which forgets the prompts."""
        if self._mixed is not None or not 0 < tokens <= len(self._prompts[row]):
            return None
        rings = any(store.keep for store in self._runner.plan.stores)
        ids = tuple(self._prompts[row][:tokens].tolist())
        return Held(ids, self._stores.take(int(self._sequences[row]), tokens), whole=rings)

    def keep(self, rows: Sequence[int]) -> None:
        kept = set(rows)
        for row, sequence in enumerate(self._sequences):
            if row not in kept:
                self._stores.release(int(sequence))
        self.lengths = [self.lengths[row] for row in rows]
        self._sequences = self._sequences[list(rows)]
        self._every = np.arange(len(rows), dtype=np.int32)
        self._scores = np.empty((len(rows), self._scores.shape[1]), np.float32)
        if self._mixed is not None:
            self._mixed.keep(rows)

    def all_scores(self) -> np.ndarray:
        """Read the only prompt and give the scores after each of its tokens."""
        scores = np.empty((self.longest, self._scores.shape[1]), np.float32)
        for at in range(0, self.longest, CHUNK):
            ids = self._prompts[0][at : at + CHUNK]
            rows = np.zeros(len(ids), np.int32)
            places = np.arange(at, at + len(ids), dtype=np.int32)
            wanted = np.arange(len(ids), dtype=np.int32)
            self._run(ids, rows, places, wanted, scores[at : at + len(ids)], prompt=True)
        return scores

    def _append(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: np.ndarray, scores: np.ndarray
    ) -> None:
        """More tokens of some rows; `wanted`: which of all these tokens, counted in order, give scores."""
        counts = [len(ids) for ids in tokens]
        positions = [np.arange(self.lengths[row], self.lengths[row] + n) for row, n in zip(rows, counts, strict=True)]
        for row, n in zip(rows, counts, strict=True):
            self.lengths[row] += n
        flat = np.array([token for ids in tokens for token in ids], np.int32)
        places = np.repeat(np.array(list(rows), np.int32), counts)
        self._run(flat, places, np.concatenate(positions).astype(np.int32), wanted, scores)

    def _read(self, start: int, stop: int) -> None:
        begins = {row: max(start, self.starts[row]) for row, length in enumerate(self.lengths) if length > start}
        present = [row for row, begin in begins.items() if begin < min(stop, self.lengths[row])]
        if not present:
            return
        pieces = [self._prompts[row][begins[row] : stop] for row in present]
        counts = [len(piece) for piece in pieces]
        ends = np.cumsum(counts)
        tokens = np.concatenate(pieces)
        rows = np.repeat(np.array(present, np.int32), counts)
        positions = [
            np.arange(begins[row], begins[row] + n, dtype=np.int32) for row, n in zip(present, counts, strict=True)
        ]
        finished = [place for place, row in enumerate(present) if self.lengths[row] <= stop]
        wanted = np.array([ends[place] - 1 for place in finished], np.int32)
        scores = np.empty((len(wanted), self._scores.shape[1]), np.float32)
        self._run(tokens, rows, np.concatenate(positions), wanted, scores, prompt=True)
        self._scores[[present[place] for place in finished]] = scores

    def _run(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        *,
        prompt: bool = False,
    ) -> None:
        """`rows`: whose token each is, by its place in this pass."""
        if self._mixed is not None:
            with self._program.lock:
                self._mixed.run(self._stores, tokens, self._sequences, rows, positions, wanted, scores, prompt)
            return
        sequences = self._sequences[rows]
        for at in range(0, len(tokens), CHUNK):  # more rows than one call takes: only with very many sequences
            part = slice(at, at + CHUNK)
            inside = (wanted >= at) & (wanted < at + CHUNK)
            self._program.run(
                self._stores,
                tokens[part],
                sequences[part],
                positions[part],
                wanted[inside] - at if at or not inside.all() else wanted,
                scores if inside.all() else scores[inside.argmax() : inside.argmax() + int(inside.sum())],
                prompt=prompt,
            )


class Mixed:
    """Runs a plan with `Torch` steps: native stretches, and modules on padded batches between them."""

    def __init__(self, runner: NativeRunner, sequences: int, length: int) -> None:
        self.program = runner.program
        self.decoder = runner.decoder
        self.count = sequences
        self.cache = self.decoder.cache(batch=sequences, length=length)
        plan = runner.plan
        places = [place for place, step in enumerate(plan.steps) if isinstance(step, Torch)]
        self.torch_steps = [plan.steps[place] for place in places]
        self.stretches = [
            (before + 1, after) for before, after in pairwise([-1, *places, len(plan.steps)])
        ]  # the native steps before each torch step, and after the last

    def keep(self, rows: Sequence[int]) -> None:
        import torch

        self.count = len(rows)
        self.cache.keep(torch.tensor(list(rows)))

    def run(
        self,
        stores: Any,
        tokens: np.ndarray,
        sequences: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        prompt: bool,
    ) -> None:
        import torch

        from orchard.core.context import Context

        # Row r of the native call stands at [rows[r], column[r]] of the padded batch that modules see.
        starts = np.searchsorted(rows, np.arange(self.count))
        columns = np.arange(len(rows)) - starts[rows]
        padded = np.full((self.count, int(columns.max()) + 1), -1, np.int64)
        padded[rows, columns] = positions
        context = Context(positions=torch.from_numpy(padded), cache=self.cache)
        for place, (first, last) in enumerate(self.stretches):
            if first < last or first == 0:
                arguments = (stores, tokens, sequences[rows], positions, wanted, scores)
                self.program.run(*arguments, first=first, last=last, prompt=prompt)
            if place < len(self.torch_steps):
                self._module(self.torch_steps[place], rows, columns, context)

    def _module(self, step: Any, rows: np.ndarray, columns: np.ndarray, context: Any) -> None:
        import torch

        source = self.program.buffer(step.src, len(rows))
        target = self.program.buffer(step.to, len(rows))
        x = torch.zeros((*context.positions.shape, source.shape[1]))
        x[rows, columns] = torch.from_numpy(source)
        module = self.decoder.get_submodule(step.node)
        with torch.inference_mode():
            y = module(x) if _takes_one(module) else module(x, context)
        target[:] = y.float()[rows, columns].numpy()


def _takes_one(module: Any) -> bool:
    """Whether a module is called as x → y rather than (x, context) → y."""
    import inspect

    return len(inspect.signature(module.forward).parameters) == 1
