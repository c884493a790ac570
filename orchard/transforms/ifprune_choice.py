"""One choice of hidden units: for a prompt, or for a task.

A choice is a ranking: scores of all groups of all layers. What a budget keeps are the first of it, so choices of one ranking nest. How
much a kept group counts (λ) depends on the budget and the temperature, and belongs to the choice: a model that was trained with it
runs with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UsageError
from orchard.transforms.ifprune_topk import chosen, top_k


@dataclass(frozen=True, eq=False)
class Choice:
    """`scores` [layers, groups] on the CPU; `budget`: how many groups of each layer are kept. `temperature`: that of λ; None: what is
    kept counts in full, as for a model that was not trained to choose."""

    scores: Tensor
    budget: int
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or not self.scores.isfinite().all():
            raise ConfigError("scores of groups are [layers, groups] and finite", hint="the predictor is broken")
        self._fits(self.budget)
        if self.temperature is not None and not self.temperature > 0:
            raise ConfigError(f"a temperature of {self.temperature}", hint="use a number above 0")

    @property
    def layers(self) -> int:
        return len(self.scores)

    @property
    def of(self) -> int:
        """Groups that there are in each layer."""
        return int(self.scores.shape[1])

    @cached_property
    def ranking(self) -> Tensor:
        """All groups of each layer, best first [layers, groups]. Of equals the first."""
        return torch.argsort(self.scores, dim=-1, descending=True, stable=True)

    def groups(self, budget: int | None = None) -> list[tuple[int, ...]]:
        """The groups that are kept, of each layer, in their own order."""
        kept = self.ranking[:, : self._fits(self.budget if budget is None else budget)]
        return [tuple(row) for row in kept.sort(-1).values.tolist()]

    @cached_property
    def weights(self) -> Tensor:
        """How much each group counts [layers, groups]; 0: not kept."""
        scores = self.scores.float()
        return top_k(scores, self.budget) if self.temperature is None else chosen(scores, self.budget, self.temperature)

    def units(self) -> dict[int, Tensor]:
        """For a pass over one sequence (`Context.units`)."""
        return {layer: row[None, None] for layer, row in enumerate(self.weights)}

    def within(self, budget: int) -> Choice:
        """The same ranking with another budget: smaller ones lie in larger ones."""
        return replace(self, budget=self._fits(budget))

    def added(self, before: Choice | None) -> list[tuple[int, ...]]:
        """What this one keeps and the one before did not, layer by layer: all that has to be read."""
        if before is None:
            return self.groups()
        self._alike(before)
        return [tuple(sorted(set(a) - set(b))) for a, b in zip(self.groups(), before.groups(), strict=True)]

    def after(self, before: Choice | None, margin: float) -> Choice:
        """This choice where it is clearly better than the one before: a group comes in only for one whose score is lower by more
        than `margin`. The best newcomer is held against the worst that would go, pair by pair, so as few change as can."""
        if before is None or not margin > 0:
            return self
        self._alike(before)
        scores = self.scores.clone()
        for row, kept, new in zip(scores, before.within(self.budget).groups(), self.groups(), strict=True):
            stays = set(kept)
            coming = sorted(set(new) - stays, key=lambda group: -float(row[group]))
            going = sorted(stays - set(new), key=lambda group: float(row[group]))
            for one, other in zip(coming, going, strict=True):
                if float(row[one]) - float(row[other]) <= margin:  # trade places: the old one goes on in the new one's stead
                    row[one], row[other] = float(row[other]), float(row[one])
        return replace(self, scores=scores)

    def overlap(self, other: Choice) -> float:
        """How alike two choices are: kept by both over kept by either (Jaccard), the mean over layers."""
        self._alike(other)
        pairs = zip(self.groups(), other.groups(), strict=True)
        shares = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairs]
        return sum(shares) / len(shares)

    @classmethod
    def of_task(cls, choices: Sequence[Choice]) -> Choice:
        """One choice for a task: the mean scores of some of its prompts."""
        if not choices:
            raise UsageError("a task without prompts chooses nothing", hint="give some of its prompts")
        for other in choices[1:]:
            choices[0]._alike(other)
        return replace(choices[0], scores=torch.stack([one.scores for one in choices]).mean(0))

    def _fits(self, budget: int) -> int:
        if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget <= self.of:
            raise UsageError(f"a budget of {budget} of {self.of} groups", hint=f"use a whole number from 1 to {self.of}")
        return budget

    def _alike(self, other: Choice) -> None:
        if self.scores.shape != other.scores.shape:
            raise UsageError(
                f"choices of {tuple(self.scores.shape)} and {tuple(other.scores.shape)} groups are of other models",
                hint="compare choices of one model",
            )
