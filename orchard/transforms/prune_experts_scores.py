"""What an expert is worth: the sixteen criteria of MC-Suite (arXiv 2504.05586), written from its equations.

By weights: `ews` sum of cosines with the other experts, `rwn` length of the router's row, `wsr` stable rank, `ewn` length.
By routes: `euf` share of tokens, `ecc` how often two are asked together, `evtc` share of the vocabulary, `ets` token ids that two
have in common.
By answers: `eas` mean cosine with the others, `eae` entropy, `eao` outliers, `ean` length.
By slopes (gradients of the loss): `egs` cosines, `ege` entropy, `ego` outliers, `egn` length.

What the paper leaves open is fixed here. All three maps of an expert count: as one long vector for lengths and cosines, as the
mean of three for the stable rank, with hidden units as rows and the model's channels as columns for the entropy of slopes.
Answers are taken before the router's weights. Those of two experts are to different tokens, so `eas` compares their means. An
outlier is a number further than three standard deviations from the mean of all numbers of that expert. `ean` sums over tokens:
an expert that is asked more is worth more, which is meant.

`ecc` and `ets` speak of pairs: the pair with the least (or most) in common is taken, and the one of it that is asked less goes.
Which end goes first is the caller's to say; `HIGH` names those of which usually the highest go, because they say how replaceable
an expert is. The paper tries both ends of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.errors import ConfigError
from orchard.nn.tensors import dense_tensor
from orchard.transforms.prune_experts_cut import PARTS
from orchard.transforms.prune_experts_look import ANSWERS, FAR, OUTLIERS, ROUTES, SLOPES, Seen

LEAST = 1e-12
"""A standard deviation that is as good as none."""
RANDOM = "random"


@dataclass(frozen=True)
class Criterion:
    """`score(mixture, seen)`: [E], or [E, E] of pairs."""

    score: Callable[[Any, Seen], Tensor]
    needs: str | None = None
    """What has to be looked at; None: weights alone."""
    pairs: bool = False


def order(name: str, mixture: Any, seen: Seen | None, *, high: bool, where: str, seed: int = 0) -> list[int]:
    """All experts of a mixture, those that go first at the front. Of equals the later goes first."""
    experts = mixture.config.experts
    if name == RANDOM:
        return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
    criterion = CRITERIA[name]
    if seen is None:
        if criterion.needs is not None:
            raise ConfigError(f"{where}: nobody looked at the {criterion.needs} of its experts", hint="give texts")
        seen = Seen.nothing(experts, 1, 1, torch.device("cpu"))
    scores = criterion.score(mixture, seen).detach().double().cpu()
    if not scores.isfinite().all():
        raise ConfigError(f"{where} has weights that are not finite", hint="a broken model cannot be pruned")
    scores = -scores if high else scores
    if criterion.pairs:
        return _by_pairs(scores, seen.used.cpu())
    return (experts - 1 - scores.flip(0).argsort(stable=True)).tolist()


def _by_pairs(common: Tensor, used: Tensor) -> list[int]:
    """The pair with the least in common loses the one that is asked less, until one is left."""
    left, gone = list(range(len(common))), []
    while len(left) > 1:
        pairs = [(float(common[a, b]), a, b) for at, a in enumerate(left) for b in left[at + 1 :]]
        _, a, b = min(pairs)
        gone.append(a if used[a] < used[b] else b)
        left.remove(gone[-1])
    return gone + left


# Parts ----------------------------------------------------------------------------------------------------------------


def _maps(mixture: Any) -> list[Tensor]:
    """The three maps of all experts, each [E, H, D]."""
    gate, up, down = (dense_tensor(getattr(mixture, name), "weight").detach().float() for name in PARTS)
    return [gate, up, down.mT]


def _flat(mixture: Any) -> Tensor:
    return torch.cat([part.flatten(1) for part in _maps(mixture)], 1)


def _cosines(vectors: Tensor) -> Tensor:
    """[E]: the sum of cosines with all others."""
    units = functional.normalize(vectors.double(), dim=1)
    alike = units @ units.T
    return alike.sum(1) - alike.diagonal()


def _entropy(spreads: Tensor) -> Tensor:
    """Of channels that were normal and independent, but for what does not depend on the expert."""
    return spreads.double().clamp_min(LEAST).log().sum(-1)


def _slopes(seen: Seen) -> Tensor:
    if seen.slopes is None:
        raise ConfigError("nobody looked at gradients", hint="give texts")
    return seen.slopes.double()


# Criteria -------------------------------------------------------------------------------------------------------------


def _ews(mixture: Any, seen: Seen) -> Tensor:
    return _cosines(_flat(mixture))


def _rwn(mixture: Any, seen: Seen) -> Tensor:
    return dense_tensor(mixture.router.gate, "weight").detach().float().norm(dim=1)


def _wsr(mixture: Any, seen: Seen) -> Tensor:
    ranks = [
        part.square().sum((1, 2)) / torch.linalg.matrix_norm(part, 2).square().clamp_min(LEAST)
        for part in _maps(mixture)
        if bool(part.isfinite().all())
    ]
    # The decomposition of what is no number would end in an error that names nothing.
    return torch.stack(ranks).mean(0) if len(ranks) == len(PARTS) else torch.full((mixture.config.experts,), torch.nan)


def _ewn(mixture: Any, seen: Seen) -> Tensor:
    return _flat(mixture).norm(dim=1)


def _euf(mixture: Any, seen: Seen) -> Tensor:
    return seen.used / max(1, seen.tokens)


def _ecc(mixture: Any, seen: Seen) -> Tensor:
    return seen.together


def _evtc(mixture: Any, seen: Seen) -> Tensor:
    return seen.words.double().mean(1)


def _ets(mixture: Any, seen: Seen) -> Tensor:
    words = seen.words.double()
    return words @ words.T


def _eas(mixture: Any, seen: Seen) -> Tensor:
    return _cosines(seen.means) / max(1, len(seen.used) - 1)


def _eae(mixture: Any, seen: Seen) -> Tensor:
    return _entropy(seen.spreads)


def _eao(mixture: Any, seen: Seen) -> Tensor:
    return seen.outliers


def _ean(mixture: Any, seen: Seen) -> Tensor:
    return seen.squares.sqrt().sum(1)


def _egs(mixture: Any, seen: Seen) -> Tensor:
    return _cosines(_slopes(seen).flatten(1))


def _ege(mixture: Any, seen: Seen) -> Tensor:
    return _entropy(_slopes(seen).std(1, correction=0))


def _ego(mixture: Any, seen: Seen) -> Tensor:
    slopes = _slopes(seen).flatten(1)
    off = (slopes - slopes.mean(1, keepdim=True)).abs()
    return (off > FAR * slopes.std(1, keepdim=True, correction=0)).sum(1)


def _egn(mixture: Any, seen: Seen) -> Tensor:
    return _slopes(seen).flatten(1).norm(dim=1)


CRITERIA: dict[str, Criterion] = {
    "ews": Criterion(_ews),
    "rwn": Criterion(_rwn),
    "wsr": Criterion(_wsr),
    "ewn": Criterion(_ewn),
    "euf": Criterion(_euf, ROUTES),
    "ecc": Criterion(_ecc, ROUTES, pairs=True),
    "evtc": Criterion(_evtc, ROUTES),
    "ets": Criterion(_ets, ROUTES, pairs=True),
    "eas": Criterion(_eas, ANSWERS),
    "eae": Criterion(_eae, ANSWERS),
    "eao": Criterion(_eao, OUTLIERS),
    "ean": Criterion(_ean, ANSWERS),
    "egs": Criterion(_egs, SLOPES),
    "ege": Criterion(_ege, SLOPES),
    "ego": Criterion(_ego, SLOPES),
    "egn": Criterion(_egn, SLOPES),
}
HIGH = frozenset({"ews", "ecc", "ets", "eas", "egs"})
