"""Expert pruning: whole experts leave a mixture, the same share of every layer, and the model takes less memory at the same work
for a token.

    small = PruneExperts(keep=0.5, by="ean").apply(model, texts)                       # one look, all at once
    small = PruneExperts(keep=0.5, by="ean", rounds=4).apply(model, texts)             # some, look again, some more
    small = PruneExperts(keep=0.5, by="ean", rounds=4).in_rounds(model, texts, heal)   # and learn after each: a lottery

MC-Suite (arXiv 2504.05586): sixteen criteria (`prune_experts_scores`), and three procedures, of which the last learns from next
tokens after every round. `heal(model, number)` is the caller's: it trains the model of round `number` and gives it back. Layers
are cut alike: one threshold over all of them made bottlenecks, and was worse there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.core.seeds import fold
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.prune_experts_cut import cut_experts, enough, mixtures, with_fewer
from orchard.transforms.prune_experts_look import Seen, look
from orchard.transforms.prune_experts_scores import CRITERIA, HIGH, RANDOM, order
from orchard.transforms.prune_scores import a_share, count_of

M = TypeVar("M", bound=nn.Module)
Heal = Callable[[M, int], M]
ENDS = ("usual", "low", "high")


@dataclass(frozen=True)
class PruneExperts(Transform):
    """`keep` is the share of experts that stays in each mixture, `by` one of the criteria, or "random". `drop`: which end of it
    goes, "low" or "high"; "usual" is the high end of those that say how replaceable an expert is, and the low end of all others.
    `rounds`: how often it looks again; each round takes about the same number of experts."""

    keep: float = 0.5
    by: str = "ean"
    drop: str = "usual"
    rounds: int = 1
    seed: int = 0
    """Of "random"."""

    learns = True

    def __post_init__(self) -> None:
        if self.by not in CRITERIA and self.by != RANDOM:
            known = ", ".join([*CRITERIA, RANDOM])
            raise ConfigError(f"no criterion of experts is called {self.by!r}", hint=f"use one of {known}")
        if self.drop not in ENDS:
            raise ConfigError(f"drop is {self.drop!r}", hint="use one of " + ", ".join(ENDS))
        a_share("keep", self.keep)
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}", hint="use a whole number from 1 on")

    @property
    def looks(self) -> bool:  # type: ignore[override]
        """Whether `apply` needs texts."""
        return self.by != RANDOM and CRITERIA[self.by].needs is not None

    @property
    def high(self) -> bool:
        return self.by in HIGH if self.drop == "usual" else self.drop == "high"

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        return with_fewer(tree, self.counts(tree)[-1])

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        return self.in_rounds(model, texts, tell=tell)

    def in_rounds(self, model: M, texts: Sequence[Batch] = (), heal: Heal[M] | None = None, tell: Tell = silent) -> M:
        """Round by round: look, cut, heal. The model that is given stays as it was; what `heal` is given is its own."""
        tree: Any = model.config
        rounds = self.counts(tree.complete())
        made = model
        for number, counts in enumerate(rounds):
            going = self.order(made, texts, lambda part: tell(part / len(rounds)), number=number)
            stay = {
                path: torch.tensor(sorted(going[path][len(going[path]) - count :])) for path, count in counts.items()
            }
            made = cut_experts(made, stay)
            if heal is not None:
                made = heal(made, number)
        return made

    def counts(self, tree: Any) -> list[dict[str, int]]:
        """How many experts stay after each round, by module path. Rounds in which none would go are left out."""
        found = mixtures(tree)
        last = {path: count_of(node.experts, self.keep) for path, node in found.items()}
        for path, node in found.items():
            enough(path, node, last[path])
        rounds: list[dict[str, int]] = []
        before = {path: node.experts for path, node in found.items()}
        for number in range(1, self.rounds + 1):
            counts = {
                path: node.experts - round((node.experts - last[path]) * number / self.rounds)
                for path, node in found.items()
            }
            if counts != before:
                rounds.append(counts)
                before = counts
        return rounds or [last]

    def order(
        self, model: nn.Module, texts: Sequence[Batch] = (), tell: Tell = silent, *, number: int = 0
    ) -> dict[str, list[int]]:
        """All experts of each mixture, by module path, those that go first at the front."""
        tree: Any = model.config
        found = mixtures(tree.complete())
        seen: Mapping[str, Seen] = {}
        if self.looks:
            seen = look(model, list(found), texts, [str(CRITERIA[self.by].needs)], tell)
        return {
            path: order(
                self.by,
                model.get_submodule(path),
                seen.get(path),
                high=self.high,
                where=path,
                seed=fold(self.seed, path, number),
            )
            for path in found
        }


def expert_bytes(model: nn.Module) -> int:
    """What the experts of a model take, as they are kept."""
    tree: Any = model.config
    total = 0
    for path in mixtures(tree.complete()):
        mixture: Any = model.get_submodule(path)
        total += sum(part.nbytes for part in (mixture.gate, mixture.up, mixture.down))
    return total


def loads(seen: Seen) -> Tensor:
    """How much busier than the mean each expert is: [E], 1 for all where tokens are shared evenly."""
    return seen.used / seen.used.mean().clamp_min(1e-12)
