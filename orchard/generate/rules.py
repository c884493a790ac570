"""The rules behind `Sampling`, one small object each. All take and give scores [V] of one sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orchard.generate.protocol import Rule, State
from orchard.generate.request import Sampling

OUT = float("-inf")


def rules_of(sampling: Sampling) -> tuple[Rule, ...]:
    """The rules that a `Sampling` stands for, in order. Greedy choice needs no rule that leaves the best token best."""
    rules: list[Rule] = []
    if sampling.repetition_penalty not in (None, 1):
        rules.append(RepetitionPenalty(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return tuple(rules)
    if sampling.temperature != 1:
        rules.append(Temperature(sampling.temperature))
    if sampling.top_k is not None:
        rules.append(TopK(sampling.top_k))
    if sampling.top_p not in (None, 1):
        rules.append(TopP(sampling.top_p))
    if sampling.min_p:
        rules.append(MinP(sampling.min_p))
    return tuple(rules)


class RepetitionPenalty:
    """Tokens of the prompt and the output: positive scores divided, negative multiplied (CTRL, arXiv 1909.05858)."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty
        self._prompt: tuple[tuple[int, ...], Tensor] | None = None

    def __call__(self, scores: Tensor, state: State) -> Tensor:
        seen = torch.cat([self._prompt_ids(state.prompt), torch.tensor(state.output, dtype=torch.long)])
        old = scores[seen]
        # An id that occurs twice is written twice with the same number.
        return scores.index_copy(0, seen, torch.where(old > 0, old / self.penalty, old * self.penalty))

    def _prompt_ids(self, prompt: tuple[int, ...]) -> Tensor:
        """The prompt as a tensor, made once: it may be long, and is the same at every step."""
        if self._prompt is None or self._prompt[0] is not prompt:
            self._prompt = (prompt, torch.tensor(sorted(set(prompt)), dtype=torch.long))
        return self._prompt[1]


class Temperature:
    """Scores divided by the temperature: below 1 sharper, above 1 flatter."""

    def __init__(self, temperature: float) -> None:
        self.temperature = min(max(temperature, 1e-30), 1e30)  # what float32 can divide by

    def __call__(self, scores: Tensor, state: State) -> Tensor:
        # Counted from the best score, so that a tiny temperature gives -inf to the others and never +inf to the best.
        return (scores - scores.max()) / self.temperature


class TopK:
    """The k best scores stay; the lower id first among equals, so exactly k."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, scores: Tensor, state: State) -> Tensor:
        if self.k >= scores.numel():
            return scores
        least = scores.topk(self.k).values[-1]
        stays = scores > least
        equal = (scores == least).nonzero()[:, 0]
        stays[equal[: self.k - int(stays.sum())]] = True
        return scores.masked_fill(~stays, OUT)


class TopP:
    """The smallest set of likeliest tokens whose mass reaches p (nucleus sampling, arXiv 1904.09751); at least one."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, scores: Tensor, state: State) -> Tensor:
        mass = scores.double().softmax(-1)
        # All tokens below (1 - p) / V together have less than 1 - p, so the set never needs them: sort only the rest.
        likely = (mass >= (1 - self.p) / mass.numel()).nonzero()[:, 0]
        order = mass[likely].sort(descending=True, stable=True)
        count = int((order.values.cumsum(0) < self.p).sum()) + 1
        stays = likely[order.indices[:count]]
        return torch.full_like(scores, OUT).index_copy(0, stays, scores[stays])


class MinP:
    """Tokens at least `share` as likely as the likeliest stay (arXiv 2407.01082)."""

    def __init__(self, share: float) -> None:
        self.distance = math.log(share)

    def __call__(self, scores: Tensor, state: State) -> Tensor:
        return scores.masked_fill(scores - scores.max() < self.distance, OUT)
