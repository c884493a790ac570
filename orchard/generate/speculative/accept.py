"""Which guesses are kept: a judge says, place after place, what the next token of the answer is.

A judge has the form of a sampler's step. As long as it gives the token that was guessed for a place, the model's scores after
that guess are the scores for the next place; the first other token ends the call. After the last guess there is one token more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from orchard.core.seeds import fold
from orchard.generate.errors import NumericError
from orchard.generate.protocol import State
from orchard.generate.sampling import Sampler, Uniforms
from orchard.generate.speculative.drafting import Choose, Draft, Forced
from orchard.ops.kernels.sampling import pick

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchard.generate.request import Request
    from orchard.generate.speculative.coarse import Groups


class Judge(Protocol):
    """`step(state, scores, draft, place) → state` with one more token. `scores` [V] are the model's after the tokens of `state`,
    the last `place` of which are the first guesses of the draft; with `place == len(draft)` no guess is left to judge."""

    def step(self, state: State, scores: np.ndarray, draft: Draft, place: int) -> State: ...


def judge_of(request: Request, sampler: Sampler) -> Judge:
    """The judge that a request asks for; without speculation, and where guesses are named and not drawn, the sampler's choice."""
    wanted = request.speculation
    if wanted is None or wanted.accept == "same":
        return Same(sampler)
    if request.seed is None:
        raise ValueError("a judge needs a request with a seed: use `request.seeded()`")
    if wanted.accept == "rejection":
        return Rejection(sampler, request.seed)
    assert wanted.groups is not None  # checked when it was made
    return Coarse(sampler, request.seed, wanted.groups)


def chooser_of(request: Request, sampler: Sampler) -> Choose:
    """How a draft model's scores become guesses: by the row's own rules, so that what they rule out is never guessed.

    For "same" with the number that the sampler itself will use for that place: close laws then mostly give the same token.
    Otherwise with numbers of their own, since the law of what is kept is exact only if the judge's are independent of them.
    """
    wanted = request.speculation
    if wanted is None or wanted.accept == "same" or sampler.greedy:
        return lambda scores, state: (sampler.step(state, scores).output[-1], None)
    if request.seed is None:
        raise ValueError("guesses need a request with a seed: use `request.seeded()`")
    uniforms = Uniforms(fold(request.seed, "draft"))

    def draw(scores: np.ndarray, state: State) -> tuple[int, np.ndarray]:
        guessed = law(sampler, scores, state)
        return _drawn(guessed, uniforms[len(state.output)]), guessed

    return draw


def forced_of(request: Request, sampler: Sampler) -> Forced | None:
    """What a row's rules say must come next, as the row itself will take it; None where it takes every token from the model's
    scores, or where each guess needs the law that it was drawn from."""
    wanted = request.speculation
    drawn = wanted is not None and wanted.accept != "same" and not sampler.greedy
    rules = [rule.forced for rule in sampler.rules if hasattr(rule, "forced")]
    if drawn or request.logprobs is not None or not rules:
        return None
    return lambda state: next((tokens for forced in rules if (tokens := forced(state))), ())


def possible(draft: Draft, sampler: Sampler, state: State) -> Draft:
    """The guesses before the first that a rule forbids, as far as rules can say so without scores: `reads(state, ids)`, where
    a rule has it, tells how many of the tokens could follow one another. The others are found out by their probability of 0."""
    for rule in sampler.rules:
        reads = getattr(rule, "reads", None)
        if reads is not None and len(draft):
            draft = draft.first(reads(state, draft.ids))
    return draft


def agreed(tokens: Sequence[int], guesses: Sequence[int]) -> int:
    """How many of the guesses came true, from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, guesses, strict=False)))


def law(sampler: Sampler, scores: np.ndarray, state: State) -> np.ndarray:
    """The probabilities [V] (float64) by which the sampler chooses. Raises what the sampler would raise."""
    probabilities = np.zeros(scores.size)
    if sampler.greedy:
        probabilities[sampler.step(state, scores).output[-1]] = 1.0
        return probabilities
    if not (np.isfinite(scores.min()) and np.isfinite(scores.max())):
        sampler.step(state, scores)  # raises, and says what is wrong
    for rule in sampler.rules:
        scores = rule(scores, state)
    best = scores.max()
    if not np.isfinite(best):
        raise NumericError(
            f"the rules left no token to choose as token {len(state.output) + 1} of the answer",
            hint="loosen the rules: every token was ruled out, or one of them made scores infinite",
        )
    left = np.flatnonzero(scores > -np.inf)
    mass = np.exp(scores[left].astype(np.float64) - np.float64(best))
    probabilities[left] = mass / mass.sum()
    return probabilities


class Same:
    """The sampler's own choice with its own number for that place: the tokens are those of no speculation, by construction."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def step(self, state: State, scores: np.ndarray, draft: Draft, place: int) -> State:
        return self._sampler.step(state, scores)


class Rejection:
    """Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a guess drawn from q is kept with
    probability min(1, p/q), otherwise a token is drawn from what p has left, max(0, p - q). The token's law is exactly p.

    A guess that is named and not drawn would be kept with probability p(guess): just as often as the sampler chooses it, so
    that is what happens. All numbers belong to places of the answer. A place may be guessed several times, but is judged once,
    and whether it is judged never depends on its own numbers.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._uniforms = Uniforms(fold(seed, "accept"))

    def step(self, state: State, scores: np.ndarray, draft: Draft, place: int) -> State:
        if place >= len(draft) or draft.probabilities is None or self._sampler.greedy:
            return self._sampler.step(state, scores)
        p, q, guess = law(self._sampler, scores, state), draft.probabilities[place], draft.ids[place]
        at = 2 * len(state.output)
        if self._uniforms[at] * q[guess] < p[guess]:
            return state.plus(guess)
        left = np.maximum(p - q, 0.0)
        if not left.any():  # the same law twice, but for rounding
            left = p
        return state.plus(_drawn(left, self._uniforms[at + 1]))


class Coarse:
    """Acceptance by groups of like tokens (`coarse`): exact for groups, not for tokens."""

    def __init__(self, sampler: Sampler, seed: int, groups: Groups) -> None:
        from orchard.generate.speculative.coarse import CoarseAcceptance

        self._sampler = sampler
        self._seed = seed
        self._acceptance = CoarseAcceptance(groups)

    def step(self, state: State, scores: np.ndarray, draft: Draft, place: int) -> State:
        if place >= len(draft):
            return self._sampler.step(state, scores)
        p = law(self._sampler, scores, state)
        q = None if draft.probabilities is None else draft.probabilities[place]
        numbers = _numbers(fold(self._seed, "coarse", len(state.output)))
        return state.plus(self._acceptance.judge(p, q, draft.ids[place], numbers)[1])


def _numbers(seed: int) -> Iterator[float]:
    uniforms, place = Uniforms(seed), 0
    while True:
        yield uniforms[place]
        place += 1


def _drawn(mass: np.ndarray, uniform: float) -> int:
    """A token by its share of the mass; one that has none is never drawn."""
    with np.errstate(divide="ignore"):
        return pick(np.log(mass), uniform)
