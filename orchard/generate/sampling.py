"""Choosing the next token of one sequence: rules bend the scores, then one number between 0 and 1 picks a token.

Each request has its own stream of numbers, and step n uses the n-th, so what is chosen depends on nothing but the
request, its seed and the model's scores: not on other sequences in the batch, nor on when it was paused. Choices are
made on the CPU (float32 scores, float64 sums), the same on every device for the same scores.
"""

from __future__ import annotations

import numpy as np

from orchard.core.seeds import fold
from orchard.generate.errors import NumericError
from orchard.generate.protocol import Rule, State
from orchard.generate.request import Request, TokenLogprob
from orchard.generate.rules import choice_of, rules_of
from orchard.ops.kernels.sampling import choose, greedy, pick


class Uniforms:
    """A stream of numbers in [0, 1) that can be read at any place.

    The stream is PCG64 as numpy defines and promises to keep it, seeded with `fold(seed, "sample")`; number n is the
    upper 53 bits of its n-th raw output, times 2⁻⁵³.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(fold(seed, "sample"))
        self._drawn: list[float] = []

    def __getitem__(self, place: int) -> float:
        while len(self._drawn) <= place:
            self._drawn.append((int(self._bits.random_raw()) >> 11) * 2.0**-53)
        return self._drawn[place]


class Sampler:
    """`step(state, prediction) → state`: the state with one more token.

    Where no rule needs numpy, the sampling head does it all in one call; both ways choose the same tokens.
    """

    def __init__(self, request: Request) -> None:
        if request.seed is None:
            raise ValueError("a sampler needs a request with a seed: use `request.seeded()`")
        self.rules: tuple[Rule, ...] = (*request.rules, *rules_of(request.sampling))
        self.greedy = request.sampling.temperature == 0
        self.choice = None if request.rules else choice_of(request.sampling)
        self.uniforms = None if self.greedy else Uniforms(request.seed)

    def step(self, state: State, prediction: np.ndarray) -> State:
        """`prediction` are the model's scores [V], float32."""
        uniform = 0.0 if self.uniforms is None else self.uniforms[len(state.output)]
        if self.choice is not None:
            chosen = choose(prediction, self.choice, uniform)
        else:
            chosen = greedy(prediction)  # with rules this only checks the scores
        if chosen < 0:
            raise broken(state, prediction)
        if self.rules and self.choice is None:
            chosen = self._by_rules(state, prediction, uniform)
        return state.plus(chosen)

    def _by_rules(self, state: State, scores: np.ndarray, uniform: float) -> int:
        for rule in self.rules:
            scores = rule(scores, state)
        if not np.isfinite(scores.max()):  # NaN anywhere makes the largest NaN
            raise NumericError(
                f"the rules left no token to choose as token {len(state.output) + 1} of the answer",
                hint="loosen the rules: every token was ruled out, or one of them made scores infinite",
            )
        return int(scores.argmax()) if self.greedy else pick(scores, uniform)  # argmax: the lowest id among equals


def logprob_of(scores: np.ndarray, token_id: int, alternatives: int) -> TokenLogprob:
    """What the model itself thought of the chosen token: from its scores before any rule."""
    wide = scores.astype(np.float64)
    wide -= wide.max()
    logs = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    if not alternatives:
        return TokenLogprob(token_id, float(logs[token_id]))
    # All that are at least as likely as the last one to be reported: more than asked for where some are equal.
    least = np.partition(logs, logs.size - alternatives)[logs.size - alternatives]
    likely = np.flatnonzero(logs >= least)
    best = likely[np.argsort(-logs[likely], kind="stable")[:alternatives]]
    return TokenLogprob(token_id, float(logs[token_id]), tuple((int(i), float(logs[i])) for i in best))


def broken(state: State, scores: np.ndarray | None = None) -> NumericError:
    """Scores that no token can be chosen from, where they are at hand."""
    count = ""
    if scores is not None:
        nans, infinite = int(np.isnan(scores).sum()), int(np.isinf(scores).sum())
        count = f": {nans:,} of {scores.size:,} are NaN, {infinite:,} infinite"
    return NumericError(
        f"the model's scores are broken after {len(state.output)} new tokens{count}",
        hint="the weights are damaged, or too large for the dtype: load the model again, in float32",
    )
