"""What every objective is: a pure function of a model and a batch that gives sums, and how those sums are read.

Sums add up over micro-batches and processes without error, means do not: two micro-batches of different sizes would otherwise
weigh the same. Whoever runs an objective minimises `value / weight` over everything that belongs to one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, Batch, Loss
from orchard.core.context import Context
from orchard.core.errors import ConfigError


class LanguageModel(Protocol):
    """What objectives ask of a model; `orchard.models.language.decoder.Decoder` is one."""

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """What the head reads: [B, T, dim]."""

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] for hidden vectors."""


class Objective(ABC):
    """`objective(model, batch)` is pure: it changes neither the model nor itself. A teacher or a reference is only read."""

    per: ClassVar[Mapping[str, str]] = {}
    """Part → the part it is a sum over; "" where it is a count to be shown as it is. All others: sums over `weight`."""

    @abstractmethod
    def __call__(self, model: Any, batch: Any) -> Loss: ...

    def curves(self, weight: float, parts: Mapping[str, float]) -> dict[str, float]:
        """What to draw, from the totals of a step: each part over what it was summed over."""
        means = {}
        for name, total in parts.items():
            over = self.per.get(name, "weight")
            count = 1.0 if not over else weight if over == "weight" else parts[over]
            means[name] = total / count if count else 0.0
        return means


@dataclass(frozen=True)
class Places:
    """The tokens of a batch that something is learnt from, in one list. N tokens."""

    hidden: Tensor  # [N, dim]
    targets: Tensor  # [N]; 0 where nothing is to be learnt
    counted: Tensor  # [N], bool
    weights: Tensor  # [N], float32; 0 where nothing is to be learnt
    index: Tensor | None
    """[N]: their places in the flattened batch; None: all of it."""

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Values [N] of these tokens at their places in the batch [B, T]; 0 everywhere else."""
        if self.index is None:
            return torch.where(self.counted, values, 0).view(shape)
        return values.new_zeros(shape.numel()).index_copy(0, self.index, values).view(shape)


def places(model: LanguageModel, batch: Batch, *, skip: bool = True) -> Places:
    """Read a batch. `skip` leaves out the tokens nothing is learnt from before they are scored, which for answers after
    long prompts is most of the work; without it shapes depend on nothing but the batch's own."""
    hidden = hidden_of(model, batch).flatten(0, 1)
    targets = batch.targets.flatten()
    counted = targets != IGNORED
    weights = counted.float() if batch.weights is None else torch.where(counted, batch.weights.flatten().float(), 0)
    index = None
    if skip and not batch.full:
        index = counted.nonzero()[:, 0]
        hidden, targets, counted, weights = (x.index_select(0, index) for x in (hidden, targets, counted, weights))
    return Places(hidden, torch.where(counted, targets, 0), counted, weights, index)


def hidden_of(model: LanguageModel, batch: Batch) -> Tensor:
    """The hidden vectors [B, T, dim] of a batch: documents of one row do not see each other."""
    documents = None if batch.plain else batch.documents
    return model.hidden(batch.ids, Context(positions=batch.positions, documents=documents, causal=batch.plain))


def wide(x: Tensor) -> Tensor:
    """At least float32: sums over a vocabulary in less are not worth having."""
    return x if x.dtype == torch.float64 else x.float()


def one_of(what: str, name: str, known: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Refuse a name that is not among the known ones."""
    if name not in known:
        raise ConfigError(f"no {what} is called {name!r}", hint="use one of " + ", ".join(known))


def positive(what: str, value: float) -> None:
    """Refuse a number that is not above zero."""
    if not value > 0:
        raise ConfigError(f"{what} is {value}, and has to be above 0", hint=f"set {what} to a number above 0")


def share(what: str, value: float) -> None:
    """Refuse a number outside 0..1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{what} is {value}, and has to be between 0 and 1", hint=f"set {what} within 0..1")
