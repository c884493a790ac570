"""What a channel is worth: the importances that pruning chooses by.

A channel (a hidden unit, a group of heads, an input of a layer) is a vector of all weights that go away with it.

- `l1`, `l2`: the length of that vector.
- `activation`: how much a channel usually says, mean |activation| · the length of the weights that read it
  (the product that Wanda takes weight by weight, arXiv 2306.11695).
- `lamp`: l2² over the sum of the squares of all channels that are at least as large (arXiv 2010.07611). Within a layer this is
  the order of l2; between layers it makes channels comparable, and the last channel of a layer is worth 1 everywhere.
- `fpgm`: the sum of distances to all other channels (arXiv 1811.00250): the nearest to the geometric median is the most
  replaceable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from orchard.core.errors import ConfigError

IMPORTANCES = ("l1", "l2", "activation", "lamp", "fpgm")
PAIRS = 1 << 22
"""Distances that are held at a time."""
STEPS = 16


def known_importance(name: str, more: tuple[str, ...] = ()) -> None:
    if name not in (*IMPORTANCES, *more):
        raise ConfigError(f"no importance is called {name!r}", hint="use one of " + ", ".join((*IMPORTANCES, *more)))


def a_share(what: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{what} is {value}, and has to be above 0 and at most 1", hint="0.5 keeps half")


def importance(kind: str, vectors: Tensor, *, where: str, activity: Tensor | None = None) -> Tensor:
    """How much each of n channels is worth, [n], of vectors [n, weights]; for `activation` the vectors are of the weights that
    read a channel, and `activity` [n] is its mean magnitude. Weights that are no numbers are refused by name (`where`)."""
    known_importance(kind)
    vectors = vectors.detach().float()
    if not vectors.isfinite().all():
        raise ConfigError(f"{where} has weights that are not finite", hint="a broken model cannot be pruned")
    if kind == "l1":
        return vectors.abs().sum(1)
    if kind == "activation":
        if activity is None:
            raise ConfigError(f"{where}: nobody looked at activations", hint="give texts, or take 'l2'")
        if not activity.isfinite().all():
            raise ConfigError(f"{where} has activations that are not finite", hint="a broken model cannot be pruned")
        return vectors.norm(dim=1) * activity.float()
    if kind == "fpgm":
        return _to_all_others(vectors)
    lengths = vectors.norm(dim=1)
    return lengths if kind == "l2" else _lamp(lengths.square())


def _lamp(squares: Tensor) -> Tensor:
    """In double precision: these are sums over thousands of channels, and equal ones must not come out differently."""
    ordered, order = squares.double().sort(stable=True)
    rest = ordered.flip(0).cumsum(0).flip(0)
    scores = torch.where(rest > 0, ordered / rest.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return torch.empty_like(scores).scatter_(0, order, scores)


def _to_all_others(vectors: Tensor) -> Tensor:
    rows = max(1, PAIRS // max(1, len(vectors)))
    return torch.cat([torch.cdist(part, vectors).sum(1) for part in vectors.split(rows)])


def keep_each(scores: Tensor, count: int) -> Tensor:
    """The `count` best channels, in their old order. Of equals the first stay."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def count_of(size: int, share: float, multiple: int = 1) -> int:
    """How many of `size` channels stay: the nearest multiple, at least one and never more than there are."""
    return min(size, max(1, round(size * share / multiple)) * multiple)


def usual_multiple(size: int) -> int:
    """The largest power of two up to 64 that divides a width and leaves at least `STEPS` sizes to choose from: packed formats
    keep weights in groups of that many."""
    best = 64
    while size % best or size // best < min(STEPS, size):
        best //= 2
    return best


def keep_best(scores: Mapping[str, Tensor], share: float, *, together: bool, multiple: int = 1) -> dict[str, Tensor]:
    """Which channels stay, by name. Each set by itself keeps a share of its own; `together`, one threshold over all sets keeps
    that share of their sum, and at least `multiple` of each.

    Widths come out in multiples: whole runs of `multiple` channels compete, best first within each set, by their mean. Such runs
    fall off within a set, so what is taken is always its best.
    """
    if not together:
        return {name: keep_each(part, count_of(len(part), share, multiple)) for name, part in scores.items()}
    runs: list[tuple[float, str, int]] = []
    for name, part in scores.items():
        ordered = part.double().sort(descending=True, stable=True).values
        for place, run in enumerate(ordered.split(multiple)):
            runs.append((float("inf") if place == 0 else float(run.mean()), name, len(run)))
    wanted = round(share * sum(len(part) for part in scores.values()))
    counts = dict.fromkeys(scores, 0)
    for worth, name, size in sorted(runs, key=lambda run: -run[0]):  # stable: of equals the earlier set's
        if worth != float("inf") and sum(counts.values()) + size > wanted:
            break
        counts[name] += size
    return {name: keep_each(part, counts[name]) for name, part in scores.items()}
