"""A small model in float64 that looks back within its document, batches to try it on, and gradients to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import IGNORED, Batch, Loss
from orchard.core.context import Context

VOCAB, DIM = 11, 5


class Toy(nn.Module):
    """Mean of what was said so far in the same document, through a tanh, to scores."""

    def __init__(
        self, seed: int = 0, vocab: int = VOCAB, tied: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocab, DIM, generator=make, dtype=dtype))
        self.inner = nn.Parameter(torch.randn(DIM, DIM, generator=make, dtype=dtype))
        self.head = None if tied else nn.Parameter(torch.randn(vocab, DIM, generator=make, dtype=dtype))
        self.scored: list[int] = []

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        assert context.documents is not None
        same = context.documents[:, :, None] == context.documents[:, None, :]
        before = context.positions[:, :, None] >= context.positions[:, None, :]
        seen = (same & before).to(self.table.dtype)
        x = seen @ self.table[ids] / seen.sum(-1, keepdim=True)
        context.collect("size", x.square().mean())
        return torch.tanh(x @ self.inner)

    def scores(self, hidden: Tensor) -> Tensor:
        self.scored.append(hidden.shape[0])
        return hidden @ (self.table if self.head is None else self.head).T

    def forward(self, ids: Tensor, context: Context) -> Tensor:
        return self.scores(self.hidden(ids, context))


def packed(rows: Sequence[Sequence[int]], *, seed: int = 0, masked: float = 0.0, weighted: bool = False) -> Batch:
    """A batch whose rows hold documents of the given lengths, padded to the longest row."""
    make = torch.Generator().manual_seed(seed)
    width = max(1, *(sum(row) for row in rows))
    ids = torch.randint(0, VOCAB, (len(rows), width), generator=make)
    targets = torch.randint(0, VOCAB, (len(rows), width), generator=make)
    positions, documents = torch.full_like(ids, -1), torch.full_like(ids, -1)
    for r, row in enumerate(rows):
        start = 0
        for number, length in enumerate(row):
            positions[r, start : start + length] = torch.arange(length)
            documents[r, start : start + length] = number
            start += length
    hide = (documents < 0) | (torch.rand(ids.shape, generator=make) < masked)
    weights = torch.rand(ids.shape, generator=make) if weighted else None
    return Batch(ids, targets.masked_fill(hide, IGNORED), positions, documents, weights)


def part(batch: Batch, rows: slice | list[int], columns: slice = slice(None)) -> Batch:
    """Some rows, and columns, of a batch."""
    fields = (batch.ids, batch.targets, batch.positions, batch.documents, batch.weights)
    return Batch(*(None if x is None else x[rows][:, columns] for x in fields))


def plain_scores(model: Toy, batch: Batch) -> Tensor:
    return model(batch.ids, Context(positions=batch.positions, documents=batch.documents))


def gradients(model: nn.Module, value: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters())]


def assert_same(model: nn.Module, one: Tensor, other: Tensor, tolerance: float = 1e-9) -> None:
    """The same value and the same gradient of every parameter."""
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    for a, b in zip(gradients(model, one), gradients(model, other)):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def assert_adds_up(model: nn.Module, whole: Loss, pieces: Sequence[Loss], tolerance: float = 1e-9) -> None:
    """The sums of micro-batches are those of the batch."""
    assert_same(model, whole.value, torch.stack([piece.value for piece in pieces]).sum(), tolerance)
    torch.testing.assert_close(whole.weight, torch.stack([piece.weight for piece in pieces]).sum())
    for name, total in whole.parts.items():
        added = torch.stack([piece.parts[name] for piece in pieces]).sum()
        torch.testing.assert_close(total.double(), added.double(), atol=1e-5, rtol=1e-5)
        assert not total.requires_grad


def assert_slope(model: nn.Module, value: Callable[[], Tensor], step: float = 1e-6) -> None:
    """The gradient along a random direction is what finite differences say."""
    make = torch.Generator().manual_seed(5)
    ways = [torch.randn(p.shape, generator=make, dtype=p.dtype) for p in model.parameters()]
    slope = sum(float((g * w).sum()) for g, w in zip(gradients(model, value()), ways))
    ends: list[Any] = []
    with torch.no_grad():
        for sign in (1, -2):
            for p, w in zip(model.parameters(), ways):
                p.add_(w, alpha=sign * step)
            ends.append(float(value()))
        for p, w in zip(model.parameters(), ways):
            p.add_(w, alpha=step)
    assert abs((ends[0] - ends[1]) / (2 * step) - slope) < 1e-5 * max(1.0, abs(slope))
