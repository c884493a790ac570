"""What ways of accepting do in one context: the law of what they write, and how far it lies from the target's.

Sampling goes through the product's acceptance (`orchard.generate.speculative.coarse`). The worked-out laws are this study's own,
from the definitions, and so check it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orchard.generate.speculative.coarse import CoarseAcceptance, Groups
from orchard.studies._pcg_synthetic import Laws

Way = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The law of the written token, from p and q."""


def exact(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p


def coarse(groups: Groups) -> Way:
    """A drafted token stays with the mean chance of the groups that hold it; the rest of each group goes by the target."""

    def law(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        wanted, drafted = groups.law(p), groups.law(q)
        kept = np.minimum(1, wanted / np.maximum(drafted, 1e-300))
        left = np.maximum(wanted - drafted, 0) / np.maximum(wanted, 1e-300)
        return q * _mean_of_groups(groups, kept) + p * _mean_of_groups(groups, left)

    return law


def naive(share: float) -> Way:
    """A drafted token stays where the target gives it so much of its best token's probability; else the target draws."""

    def law(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        stays = q * (p >= share * p.max())
        return stays + (1 - stays.sum()) * p

    return law


def naive_acceptance(laws: Sequence[Laws], share: float) -> float:
    return float(np.mean([q[p >= share * p.max()].sum() for p, q in laws]))


def naive_share(laws: Sequence[Laws], acceptance: float) -> float:
    """The share with which the naive way accepts as much."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if naive_acceptance(laws, middle) > acceptance else (low, middle)
    return low


def distances(points: np.ndarray) -> np.ndarray:
    """Between all tokens [V, V], in the space of what they stand for."""
    squares = (points**2).sum(1)
    found: np.ndarray = np.sqrt(np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0))
    np.fill_diagonal(found, 0)
    return found


def errors(laws: Sequence[Laws], way: Way, apart: np.ndarray) -> tuple[float, float]:
    """Two errors of what is written: its mean distance to a sample of the target's law, which favours whoever writes
    nothing but likely tokens, and the distance of its law from the target's (energy distance: 0 for equal laws only)."""
    mean, energy = [], []
    for p, q in laws:
        written = way(p, q)
        to_target = apart @ p
        mean.append(written @ to_target)
        energy.append(2 * mean[-1] - written @ (apart @ written) - p @ to_target)
    return float(np.mean(mean)), float(np.mean(energy))


def count(
    acceptance: CoarseAcceptance, p: np.ndarray, q: np.ndarray, samples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """How often each group and each token came out of so many judgements of drafts from q, and the share that was kept."""
    size = len(p)
    groups, tokens = np.empty(samples, np.int64), np.empty(samples, np.int64)
    kept, numbers = 0, iter(rng.random, None)
    for n, drafted in enumerate(rng.choice(size, samples, p=q / q.sum()).tolist()):
        accepted, tokens[n], groups[n] = acceptance.decide(p, q, drafted, numbers)
        kept += accepted
    return np.bincount(groups, minlength=size), np.bincount(tokens, minlength=size), kept / samples


def off(counts: np.ndarray, law: np.ndarray) -> float:
    """Total variation between what was counted and a law."""
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


def off_by_chance(law: np.ndarray, samples: int, rng: np.random.Generator, rounds: int = 5) -> float:
    """The total variation that as many samples of the law itself show, on average of some rounds."""
    law = law / law.sum()
    return float(np.mean([off(rng.multinomial(samples, law), law) for _ in range(rounds)]))


def tokens_per_call(
    laws: Sequence[Laws], acceptance: CoarseAcceptance, guesses: int, calls: int, rng: np.random.Generator
) -> float:
    """Tokens that a call of the target gives where every place is another of these contexts: those kept, and one more."""
    sums = [q.cumsum() for _, q in laws]
    written, numbers = 0, iter(rng.random, None)
    for _ in range(calls):
        for _ in range(guesses):
            place = int(rng.integers(len(laws)))
            p, q = laws[place]
            drafted = min(int(np.searchsorted(sums[place], rng.random() * sums[place][-1], side="right")), len(q) - 1)
            written += 1
            if not acceptance.judge(p, q, drafted, numbers)[0]:
                break
        else:
            written += 1
    return written / calls


def _mean_of_groups(groups: Groups, chance: np.ndarray) -> np.ndarray:
    return np.add.reduceat(chance[groups.members], groups.offsets[:-1]) / groups.sizes
