"""Which tokens stay, given what each is worth: numpy, for sequences that do not live in torch.

The same choice as `orchard.cache.policies.scored` makes for tensors: the best `budget` of each head, or the best budget × heads
of all heads of a layer together; of equal ones the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchard.core.errors import ConfigError


def choose(
    scores: Sequence[np.ndarray], budget: int, *, sinks: int = 0, newest: int = 0, flat: bool = False
) -> list[np.ndarray]:
    """The slots that stay, ascending, for each head of a layer; `scores`: one number per token of a head, oldest first. The
    first `sinks` and the `newest` tokens stay whatever they are worth."""
    check_budget(budget, sinks, newest)
    worth = [_always(np.asarray(score, np.float32), sinks, newest) for score in scores]
    if not flat:
        return [np.sort(_best(score, len(score) - np.arange(len(score)), budget)) for score in worth]
    # Heads side by side, so that ties are settled fairly among them.
    head = np.repeat(np.arange(len(worth)), [len(score) for score in worth])
    slot = np.concatenate([np.arange(len(score)) for score in worth])
    longest = max(len(score) for score in worth)
    kept = _best(np.concatenate(worth), (longest - slot) * len(worth) + head, budget * len(worth))
    return [np.sort(slot[kept[head[kept] == number]]) for number in range(len(worth))]


def check_budget(budget: int, sinks: int, newest: int) -> None:
    always = sinks + newest
    if budget <= always:
        raise ConfigError(
            f"a budget of {budget} tokens has no room beside the {always} that always stay",
            hint=f"use a budget above {always}, or fewer sinks",
        )


def _always(scores: np.ndarray, sinks: int, newest: int) -> np.ndarray:
    worth = np.nan_to_num(scores, nan=0.0)
    worth[:sinks] = np.inf
    worth[max(0, len(worth) - newest) :] = np.inf
    return worth


def _best(worth: np.ndarray, ties: np.ndarray, count: int) -> np.ndarray:
    """The places of the highest `count`; of equal ones those with the smaller `ties`."""
    order = np.lexsort((ties, -worth))[:count]
    return order.astype(np.int32)
