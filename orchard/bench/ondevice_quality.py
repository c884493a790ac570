"""What compression costs, by kind of text: every subject reads the same rows, and its scores are held against the reference's.

A subject is whatever gives scores for rows: our engine on a file as users run it, torch modules, a peer in a process of its own.
The reference is the original with its weights read in bfloat16, computed in float32, so that nothing else is rounded. Shapes: T
tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import UsageError
from orchard.evals.following import MAX_TOKENS, Check, Followed, follow
from orchard.evals.likeness import Likeness, likeness, together

Rows = Sequence[np.ndarray]
PIECE = 4
"""Rows that are read before the next subject does: a peer keeps the scores of so many on disk."""


class Subject(Protocol):
    """Scores [T, V] of each row of token ids, one after another, made when they are asked for."""

    def scores(self, rows: Rows) -> Iterator[np.ndarray | Tensor]: ...


class OwnEngine:
    """A file in our engine, as `orchard chat` runs it: keys and values as the model keeps them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, rows: Rows) -> Iterator[np.ndarray | Tensor]:
        runner = self.model.runner
        if not hasattr(runner, "scores"):  # no native kernels here: torch, through the stores
            yield from Modules(self.model.decoder, stores=True).scores(rows)
            return
        for row in rows:
            yield runner.scores(row.tolist())


class Modules:
    """Torch modules."""

    def __init__(self, decoder: Any, *, stores: bool = False) -> None:
        self.decoder, self.stores = decoder, stores

    def scores(self, rows: Rows) -> Iterator[np.ndarray | Tensor]:
        # Not one generator with the mode switched inside: several are read by turns, and would leave it to each other.
        return (self._of(row) for row in rows)

    @torch.inference_mode()
    def _of(self, row: np.ndarray) -> Tensor:
        ids = torch.from_numpy(row)[None]
        positions = torch.arange(ids.shape[1])[None]
        cache = self.decoder.cache(batch=1, length=ids.shape[1]) if self.stores else None
        context = Context(positions=positions, cache=cache, causal=cache is None)
        scores: Tensor = self.decoder.scores(self.decoder.hidden(ids, context))
        return scores.float()[0]


def reference_of(path: Path) -> Any:
    """The original's modules: weights rounded to bfloat16, in float32."""
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.load import load_decoder

    with open_checkpoint(path) as checkpoint:
        return load_decoder(checkpoint, dtype=torch.bfloat16).float().eval()


def compare(
    subjects: Mapping[str, Subject],
    reference: Subject,
    rows: Rows,
    tell: Callable[[float], None] = lambda _: None,
) -> dict[str, Likeness]:
    """Hold every subject against the reference on these rows (T + 1 tokens each). `tell` is told of every row (1.0)."""
    if not rows:
        raise UsageError("there is no text to compare models on", hint="give --texts KIND=FILE")
    parts: dict[str, list[Likeness]] = {name: [] for name in subjects}
    for start in range(0, len(rows), PIECE):
        piece = rows[start : start + PIECE]
        read = [row[:-1] for row in piece]
        everybody: Iterable[Any] = zip(*(subject.scores(read) for subject in subjects.values()), strict=True)
        for row, true, given in zip(piece, reference.scores(read), everybody, strict=True):
            batch = _batch(row)
            for name, scores in zip(subjects, given, strict=True):
                parts[name].append(likeness(_Known(scores), _Known(true), [batch]))
            tell(1.0)
    return {name: together(found) for name, found in parts.items()}


def followed(model: Any, checks: Sequence[Check]) -> Followed:
    """The checks of instruction following, the likeliest token each time."""

    def answers(prompts: Sequence[str]) -> list[str]:
        return [answer.text for answer in model.generate_many(list(prompts), max_tokens=MAX_TOKENS)]

    return follow(checks, answers)


# Inside -----------------------------------------------------------------------------------------------------------------


class _Known:
    """A model of which only the scores of one row are known."""

    def __init__(self, scores: np.ndarray | Tensor) -> None:
        self.table = torch.as_tensor(scores)

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        return self.table[None]

    def scores(self, hidden: Tensor) -> Tensor:
        return hidden


def _batch(row: np.ndarray) -> Batch:
    places = np.arange(len(row) - 1, dtype=np.int64)[None]
    return Batch(row[None, :-1], row[None, 1:], places, np.zeros_like(places), plain=True, full=True)
