"""Who thinks and who does not: what a policy costs and how often it is right, and how well a score ranks prompts.

A policy skips thinking where its score is high. Accuracies are means over several answers to each prompt, so that
comparing two policies on the same prompts compares the policies and not the dice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchard.studies._sonata_answers import Outcome


@dataclass(frozen=True)
class Record:
    """For each prompt [N]: how often it is answered right without and with thinking, and the tokens that each takes."""

    direct: np.ndarray
    think: np.ndarray
    direct_tokens: np.ndarray
    think_tokens: np.ndarray

    @classmethod
    def of(cls, direct: Outcome, think: Outcome) -> Record:
        return cls(direct.right.mean(1), think.right.mean(1), direct.tokens.mean(1), think.tokens.mean(1))

    def __getitem__(self, rows: np.ndarray) -> Record:
        return Record(self.direct[rows], self.think[rows], self.direct_tokens[rows], self.think_tokens[rows])

    def accuracy(self, skip: np.ndarray) -> float:
        """In percent."""
        return float(100 * np.where(skip, self.direct, self.think).mean())

    def tokens(self, skip: np.ndarray) -> float:
        """As a share of always thinking."""
        return float(np.where(skip, self.direct_tokens, self.think_tokens).sum() / self.think_tokens.sum())

    def random(self, share: float) -> float:
        """The accuracy to expect when so many prompts, any of them, skip thinking."""
        return float(100 * (share * self.direct + (1 - share) * self.think).mean())


def cut_at_cost(score: np.ndarray, record: Record, cost: float) -> float:
    """The threshold on a score whose policy (skip above it) comes nearest to a cost; what it costs more counts tenfold."""
    best, found = np.inf, -np.inf
    for cut in [-np.inf, *np.unique(score)]:
        excess = record.tokens(score > cut) - cost
        distance = abs(excess) if excess <= 1e-9 else 10 * excess
        if distance < best:
            best, found = distance, float(cut)
    return found


def pareto(score: np.ndarray, record: Record, cuts: Sequence[float]) -> list[list[float]]:
    """[threshold, share that skips, tokens, accuracy] for each threshold."""
    return [
        [float(cut), float(skip.mean()), record.tokens(skip), record.accuracy(skip)]
        for cut, skip in ((cut, score > cut) for cut in cuts)
    ]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Rank correlation; equal values share their mean rank. 0 where one of them does not vary."""
    a, b = ranks(one), ranks(other)
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def auc(score: np.ndarray, right: np.ndarray) -> float:
    """How often a right answer's prompt [N] scores higher than a wrong one's, over all answers [N, S]; 0.5 is chance."""
    every, label = np.repeat(score, right.shape[1]), right.reshape(-1)
    positive, negative = int(label.sum()), int((~label).sum())
    if not positive or not negative:
        return 0.5
    return float((ranks(every)[label].sum() - positive * (positive + 1) / 2) / (positive * negative))


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1 on; equal values share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return ((last - count + 1 + last) / 2)[place]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of some repetitions."""
    low, high = np.quantile(np.asarray(values), (0.025, 0.975))
    return float(low), float(high)


def resamples(count: int, seed: int, repetitions: int = 1000) -> np.ndarray:
    """Rows drawn with replacement, [repetitions, count], for intervals (the bootstrap)."""
    return np.random.default_rng(seed).integers(0, count, (repetitions, count))
