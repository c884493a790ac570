"""The step on mixtures of experts: fewer of them."""

from __future__ import annotations

from orchard.recipes.compressing.step import Lessons, Step
from orchard.recipes.compressing.steps import step


@step
def prune_experts(
    keep: float = 0.5,
    by: str = "ean",
    drop: str = "usual",
    rounds: int = 4,
    learn: bool = True,
    tokens: int | None = None,
    share: float = 1.0,
    lr: float = 3e-4,
) -> Step:
    """Take away the experts that matter least, some in each round, and train the rest to make up for them (arXiv 2504.05586).

    keep: the share of experts that stays in each layer
    by: ean, or another of ews, rwn, wsr, ewn, euf, ecc, evtc, ets, eas, eae, eao, egs, ege, ego, egn; random
    drop: which end goes: usual, low or high
    rounds: how often experts are looked at anew
    learn: train after every round, twice as long as after the one before
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.prune_experts import PruneExperts

    made = PruneExperts(keep=keep, by=by, drop=drop, rounds=rounds)
    if not learn:
        return Step(made, costs=(1.05, 3.0))
    return Step(made, lessons=Lessons(share=share, tokens=tokens, lr=lr, between=True), costs=(1.03, 1.8))
