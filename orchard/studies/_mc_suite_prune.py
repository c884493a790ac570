"""One mixture, pruned in every way that `mc-suite` compares, and the worth of its experts by what the loss says without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.studies import _afm_ground as ground_
from orchard.studies import _mc_suite_model as models
from orchard.studies._mc_suite_model import Size
from orchard.transforms.prune_experts import PruneExperts, expert_bytes, loads
from orchard.transforms.prune_experts_cut import cut_experts, mixtures
from orchard.transforms.prune_experts_look import ANSWERS, OUTLIERS, ROUTES, SLOPES, Seen, look
from orchard.transforms.prune_experts_scores import CRITERIA, order

KEEP = 0.5
BY = "ean"
LOTTERY, UNBALANCED = "lottery", "lottery without balance loss"


@dataclass
class Found:
    """Of one mixture. Perplexities by the way it was pruned."""

    whole: float
    perplexity: dict[str, float] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    """Of random choices."""
    by_criterion: dict[str, tuple[float, float]] = field(default_factory=dict)
    """All at once, from the low end and from the high end."""
    agreement: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The rank correlation of an order with the loss of single removals, of both ends: mean over layers."""
    loads: dict[str, list[tuple[int, str, float, float]]] = field(default_factory=dict)
    """Round, layer, and the busiest expert's load over the mean, before and after healing: with and without a balance loss."""
    memory: float = 0.0


def measured(size: Size, seed: int, *, unbalanced: bool = False) -> Found:
    """`unbalanced`: heal once more, without a balance loss."""
    model = models.trained(size, seed)
    looked = models.texts(size, size.looked, seed, "looked at")
    held = models.texts(size, size.held_out, seed, "held out")
    found = Found(models.perplexity(model, held))
    once = partial(PruneExperts, keep=KEEP)
    rounds = partial(once, rounds=size.rounds)

    def after(prune: PruneExperts) -> float:
        return models.perplexity(prune.apply(model, looked if prune.looks else ()), held)

    found.perplexity = {"one-shot": after(once(by=BY, drop="low"))}
    found.perplexity["iterative"] = after(rounds(by=BY, drop="low"))
    found.perplexity["high end"] = after(rounds(by=BY, drop="high"))
    found.chances = [after(rounds(by="random", seed=fold(seed, "chance", at))) for at in range(size.chances)]
    found.perplexity["random"] = sum(found.chances) / len(found.chances)
    ways = {LOTTERY: size.heal_balance} | ({UNBALANCED: 0.0} if unbalanced else {})
    for name, balance in ways.items():
        made, found.loads[name] = lottery(model, rounds(by=BY, drop="low"), size, looked, seed, balance)
        found.perplexity[name] = models.perplexity(made, held)
        found.memory = expert_bytes(made) / expert_bytes(model)
    compared(model, size, looked, held, seed, found)
    return found


def lottery(
    model: Decoder, prune: PruneExperts, size: Size, looked: Sequence[Batch], seed: int, balance: float
) -> tuple[Decoder, list[tuple[int, str, float, float]]]:
    """With what the loads of every layer were before and after healing in each round."""
    told: list[tuple[int, str, float, float]] = []

    def heal(made: Decoder, number: int) -> Decoder:
        before = busiest(made, looked)
        made = models.healed(made, size, number, seed, balance)
        after = busiest(made, looked)
        told.extend((number, path, before[path], after[path]) for path in before)
        return made

    return prune.in_rounds(model, looked, heal), told


def busiest(model: Decoder, looked: Sequence[Batch]) -> dict[str, float]:
    """The load of the busiest expert over the mean, by layer."""
    seen = look(model, list(mixtures(model.config.complete())), looked, [ROUTES])
    return {path: float(loads(one).max()) for path, one in seen.items()}


def compared(
    model: Decoder, size: Size, looked: Sequence[Batch], held: Sequence[Batch], seed: int, found: Found
) -> None:
    """Every criterion, by one look: what is left without half of the experts, and how it agrees with single removals."""
    paths = list(mixtures(model.config.complete()))
    seen = look(model, paths, looked, [ROUTES, ANSWERS, OUTLIERS, SLOPES])
    grown = removals(model, paths, models.texts(size, size.removal, seed, "removal"))
    keep = round(KEEP * size.experts)
    for name in CRITERIA:
        left, agree = [], []
        for high in (False, True):
            orders = {path: _order(name, model, path, seen[path], high) for path in paths}
            kept = {path: torch.tensor(sorted(going[-keep:])) for path, going in orders.items()}
            left.append(models.perplexity(cut_experts(model, kept), held))
            agree.append(sum(rank_correlation(orders[path], grown[path]) for path in paths) / len(paths))
        found.by_criterion[name] = (left[0], left[1])
        found.agreement[name] = (agree[0], agree[1])


def _order(name: str, model: Decoder, path: str, seen: Seen, high: bool) -> list[int]:
    return order(name, model.get_submodule(path), seen, high=high, where=path)


def removals(model: Decoder, paths: Sequence[str], read: Sequence[Batch]) -> dict[str, Tensor]:
    """What the loss grows by without each single expert, by layer."""
    before = ground_.loss_on(model, read)
    grown: dict[str, Tensor] = {}
    for path in paths:
        experts = model.get_submodule(path).config.experts  # type: ignore[union-attr]
        others = [torch.tensor([one for one in range(experts) if one != gone]) for gone in range(experts)]  # type: ignore[arg-type]
        losses = [ground_.loss_on(cut_experts(model, {path: stay}), read) - before for stay in others]
        grown[path] = torch.tensor(losses, dtype=torch.float64)
    return grown


def rank_correlation(going: Sequence[int], worth: Tensor) -> float:
    """Spearman's, of the places of experts in an order (the last to go is worth most) and what they are worth."""
    places = torch.empty(len(going), dtype=torch.float64)
    places[torch.tensor(going)] = torch.arange(len(going), dtype=torch.float64)
    ranks = worth.argsort().argsort().double()
    return float(torch.corrcoef(torch.stack([places, ranks]))[0, 1])
