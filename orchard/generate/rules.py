"""The rules behind `Sampling`, one small object each. All take and give scores [V] of one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from orchard.generate.protocol import Rule, State, Tokens
from orchard.generate.request import Sampling
from orchard.ops.kernels.sampling import Choice, k_best, near_best, nucleus, scaled

COLDEST, HOTTEST = 1e-30, 1e30
"""What float32 can divide by."""


def rules_of(sampling: Sampling) -> tuple[Rule, ...]:
    """The rules that a `Sampling` stands for, in order. Greedy choice needs no rule that leaves the best token best."""
    rules: list[Rule] = []
    if sampling.repetition_penalty not in (None, 1):
        rules.append(RepetitionPenalty(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        rules.append(AnswerPenalty(sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0))
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


def choice_of(sampling: Sampling) -> Choice | None:
    """The same rules as one call of the sampling head; None where it does not do all of them."""
    penalties = sampling.repetition_penalty not in (None, 1) or sampling.presence_penalty or sampling.frequency_penalty
    if penalties or sampling.temperature == 0:
        return None
    return Choice(
        temperature=_bounded(sampling.temperature),
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        distance=math.log(sampling.min_p) if sampling.min_p else -math.inf,
    )


class RepetitionPenalty:
    """Tokens of the prompt and the output: positive scores divided, negative multiplied (CTRL, arXiv 1909.05858)."""

    def __init__(self, penalty: float) -> None:
        self.penalty = np.float32(min(max(penalty, COLDEST), HOTTEST))
        self._prompt: tuple[int, ...] = ()
        self._output = Tokens()
        self._seen: dict[int, None] = {}
        self._ids = np.empty(0, dtype=np.int64)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        seen = self._seen_in(state)
        old = scores[seen]
        out = scores.copy()
        with np.errstate(over="ignore"):
            out[seen] = np.where(old > 0, old / self.penalty, old * self.penalty)
        return out

    def _seen_in(self, state: State) -> np.ndarray:
        """Every id once. What was worked out for the last state is gone on from, so that a step costs one token."""
        if self._prompt is not state.prompt or not state.output.goes_on_from(self._output):
            self._prompt, self._output = state.prompt, Tokens()
            self._seen, self._ids = dict.fromkeys(state.prompt), np.empty(0, dtype=np.int64)
        self._seen.update(dict.fromkeys(state.output[len(self._output) :]))
        self._output = state.output
        if len(self._ids) != len(self._seen):
            self._ids = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
        return self._ids


class AnswerPenalty:
    """Tokens of the output: `presence` off the scores of each that is there, `frequency` off for every time it is."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence = presence
        self.frequency = frequency
        self._output = Tokens()
        self._often: dict[int, int] = {}

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        if not state.output.goes_on_from(self._output):
            self._output, self._often = Tokens(), {}
        for token in state.output[len(self._output) :]:
            self._often[token] = self._often.get(token, 0) + 1
        self._output = state.output
        out = scores.copy()
        ids = np.fromiter(self._often, dtype=np.int64, count=len(self._often))
        times = np.fromiter(self._often.values(), dtype=np.float32, count=len(ids))
        out[ids] -= np.float32(self.presence) + np.float32(self.frequency) * times
        return out


class LogitBias:
    """Something added to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.fromiter(bias, dtype=np.int64, count=len(bias))
        self._values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        out = scores.copy()
        out[self._ids] += self._values
        return out


class Temperature:
    """Scores divided by the temperature: below 1 sharper, above 1 flatter."""

    def __init__(self, temperature: float) -> None:
        self.temperature = _bounded(temperature)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        return scaled(scores, self.temperature)


class TopK:
    """The k best scores stay; the lower id first among equals, so exactly k."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        return k_best(scores, self.k)


class TopP:
    """The smallest set of likeliest tokens whose mass reaches p (nucleus sampling, arXiv 1904.09751); at least one."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        return nucleus(scores, self.p)


class MinP:
    """Tokens at least `share` as likely as the likeliest stay (arXiv 2407.01082)."""

    def __init__(self, share: float) -> None:
        self.distance = math.log(share)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        return near_best(scores, self.distance)


def _bounded(temperature: float) -> float:
    return min(max(temperature, COLDEST), HOTTEST)
