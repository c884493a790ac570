"""Decode steps recorded once as CUDA graphs and replayed: one for every size of batch, up to a power of two.

A step of a small model is hundreds of launches of a few microseconds; telling the device about each would take longer than
they do. A recorded step reads its tokens, sequences and positions from fixed places, so each replay copies those there first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchard.generate.cuda.pages import PagedStores
from orchard.generate.cuda.program import Call, Program
from orchard.ops.kernels.triton.rows import PAGE, Rows

LARGEST = 256
"""Rows of the largest graph."""
PROGRAMS = 264
"""Programs that keep a GPU busy: contexts are cut into parts where there are fewer."""
MOST_SPLITS = 32
PART = 4
"""Pages that are worth a part of their own: putting parts together costs a kernel more."""


@dataclass
class Recorded:
    """A graph and the places that it reads and writes."""

    graph: Any
    inputs: Tensor
    """int32 [3, rows]: tokens, sequences, positions."""
    sent: Tensor
    """The same on the CPU, in memory that the device reads by itself."""
    scores: Tensor
    best: Tensor
    read: Tensor
    call: Call
    """Everything else that the graph reads: it knows addresses only."""


class Graphs:
    """Recorded steps of one program over one set of stores."""

    def __init__(self, program: Program, stores: PagedStores, buffers: list[Tensor]) -> None:
        self.program = program
        self.stores = stores
        self._buffers = buffers
        self._recorded: dict[tuple[int, int, bool, bool], Recorded] = {}
        self._pool: Any = None

    def step(self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, apart: bool) -> Recorded:
        """Run some rows, `apart`: no two of one sequence. What it gives is valid until the next step, and only its first rows
        are meant. The caller waits for it before the next."""
        rows = 1 << (len(tokens) - 1).bit_length()
        found = self.recorded(rows, self.splits(rows, int(positions.max())), apart)
        self._send(found, tokens, slots, positions)
        found.graph.replay()
        return found

    def burst(self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, steps: int) -> np.ndarray:
        """The best tokens of so many steps, int64 [steps, rows]: each step reads what the one before it chose, and the CPU is
        told at the end. One row of each sequence."""
        rows = 1 << (len(tokens) - 1).bit_length()
        found = self.recorded(rows, self.splits(rows, int(positions.max()) + steps), True, chained=True)
        self._send(found, tokens, slots, positions)
        chosen = torch.empty(steps, rows, dtype=torch.int64, device=self.program.device)
        for step in range(steps):
            found.graph.replay()
            chosen[step].copy_(found.best)
        best: np.ndarray = chosen[:, : len(tokens)].cpu().numpy()
        return best

    def _send(self, found: Recorded, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        host = found.sent.numpy()
        host[0], host[1], host[2] = 0, self.stores.count, 0
        host[0, : len(tokens)], host[1, : len(tokens)], host[2, : len(tokens)] = tokens, slots, positions
        found.inputs.copy_(found.sent, non_blocking=True)

    def splits(self, rows: int, longest: int) -> int:
        """Parts of the context: enough to keep the device busy, a power of two, some pages each."""
        heads = min((spec.heads for spec in self.program.plan.stores), default=1)
        wish = PROGRAMS // (rows * heads)
        parts = longest // PAGE // PART + 1
        splits = 1
        while splits < min(wish, parts, MOST_SPLITS):
            splits *= 2
        return splits

    def recorded(self, rows: int, splits: int, apart: bool, *, chained: bool = False) -> Recorded:
        """`chained`: the tokens it chooses are its own next input, one position on."""
        key = rows, splits, apart, chained
        if key not in self._recorded:
            self._recorded[key] = self._record(rows, splits, apart, chained)
        return self._recorded[key]

    def _record(self, rows: int, splits: int, apart: bool, chained: bool) -> Recorded:
        device = self.program.device
        inputs = torch.zeros(3, rows, dtype=torch.int32, device=device)
        inputs[1] = self.stores.count  # nobody's line: the step is run once before it is recorded
        call = Call(
            rows=Rows(
                tokens=inputs[0],
                slots=inputs[1],
                positions=inputs[2],
                firsts=torch.arange(rows, dtype=torch.int32, device=device),
                counts=torch.ones(rows, dtype=torch.int32, device=device),
                tile=1,
                splits=splits,
                apart=apart,
            ),
            buffers=[buffer[:rows] for buffer in self._buffers],
            pages=self.stores.layers,
            scores=torch.empty(rows, self.program.plan.vocab, device=device),
        )
        assert call.scores is not None
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.program.run(call)
            best_of(call.scores)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.program.run(call)
            best = best_of(call.scores)
            if chained:
                inputs[0].copy_(best.clamp(min=0))
                inputs[2].add_(1)
        self._pool = self._pool or graph.pool()
        assert call.read is not None
        sent = torch.empty(3, rows, dtype=torch.int32).pin_memory()
        return Recorded(graph, inputs, sent, call.scores, best, call.read, call)


def best_of(scores: Tensor) -> Tensor:
    """The best token of each row; -1 where the scores are broken."""
    best, place = scores.max(-1)
    return torch.where(best.isfinite(), place, -1)
