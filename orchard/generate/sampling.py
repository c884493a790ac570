"""Choosing the next token of one sequence: rules bend the scores, then one number between 0 and 1 picks a token.

Each request has its own stream of numbers, and step n uses the n-th, so what is chosen depends on nothing but the
request, its seed and the model's scores: not on other sequences in the batch, nor on when it was paused. Choices are
made on the CPU (float32 scores, float64 sums), the same on every device for the same scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.seeds import generator
from orchard.generate.errors import NumericError
from orchard.generate.protocol import Rule, State
from orchard.generate.request import Request, TokenLogprob
from orchard.generate.rules import rules_of


class Uniforms:
    """A stream of numbers in [0, 1) that can be read at any place."""

    def __init__(self, seed: int) -> None:
        self._generator = generator(seed, "sample")
        self._drawn: list[float] = []

    def __getitem__(self, place: int) -> float:
        while len(self._drawn) <= place:
            self._drawn.append(torch.rand((), dtype=torch.float64, generator=self._generator).item())
        return self._drawn[place]


class Sampler:
    """`step(state, prediction) → state`: the state with one more token."""

    def __init__(self, request: Request) -> None:
        if request.seed is None:
            raise ValueError("a sampler needs a request with a seed: use `request.seeded()`")
        self.rules: tuple[Rule, ...] = (*request.rules, *rules_of(request.sampling))
        self.greedy = request.sampling.temperature == 0
        self.uniforms = Uniforms(request.seed)

    def step(self, state: State, prediction: Tensor) -> State:
        """`prediction` are the model's scores [V], float32 on the CPU."""
        scores = prediction
        for rule in self.rules:
            scores = rule(scores, state)
        if not scores.max().isfinite():  # NaN anywhere makes the largest NaN
            raise NumericError(
                f"the rules left no token to choose as token {len(state.output) + 1} of the answer",
                hint="loosen the rules: every token was ruled out, or one of them made scores infinite",
            )
        if self.greedy:
            return state.plus(int(scores.argmax()))  # the lowest id among equals
        return state.plus(pick(scores, self.uniforms[len(state.output)]))


def pick(scores: Tensor, uniform: float) -> int:
    """The token at which the summed probabilities, in the order of ids, pass `uniform`."""
    left = (scores > float("-inf")).nonzero()[:, 0]
    sums = scores[left].double().softmax(-1).cumsum(0)
    place = torch.searchsorted(sums, uniform * float(sums[-1]), right=True)
    return int(left[min(int(place), len(left) - 1)])


def logprob_of(scores: Tensor, token_id: int, alternatives: int) -> TokenLogprob:
    """What the model itself thought of the chosen token: from its scores before any rule."""
    logs = scores.log_softmax(-1)
    top = logs.topk(alternatives)
    best = sorted(zip(top.values.tolist(), top.indices.tolist()), key=lambda pair: (-pair[0], pair[1]))
    return TokenLogprob(token_id, float(logs[token_id]), tuple((i, value) for value, i in best))
