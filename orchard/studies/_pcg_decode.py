"""Decoding sounds with a target and a draft, call by call, by the product's own guesses and judges.

Guesses are drawn by `chooser_of` and judged by `judge_of` (`orchard.generate.speculative.accept`), as the engine does it; what is
here is the loop around two recurrent networks, and counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchard.core.seeds import fold
from orchard.generate.protocol import State
from orchard.generate.request import Request, Sampling
from orchard.generate.sampling import Sampler
from orchard.generate.speculative import Speculation
from orchard.generate.speculative.accept import Judge, chooser_of, judge_of, law
from orchard.generate.speculative.drafting import Draft
from orchard.studies._pcg_models import CodeModel

GUESSES = 4


@dataclass
class Told:
    """What one sound took: its codes, guesses judged and kept, calls of the target, and its mean distance to the target's law."""

    codes: list[int]
    judged: int = 0
    kept: int = 0
    calls: int = 0
    distance: float = 0.0


@dataclass(frozen=True)
class Setting:
    target: CodeModel
    draft: CodeModel
    apart: np.ndarray
    """Distances between tokens [V, V]."""
    length: int
    temperature: float
    seed: int


class Naive:
    """Keeps a guess to which the target gives some share of its best token's probability; for comparison."""

    def __init__(self, sampler: Sampler, share: float) -> None:
        self._sampler = sampler
        self._share = share

    def step(self, state: State, scores: np.ndarray, draft: Draft, place: int) -> State:
        if place < len(draft):
            p = law(self._sampler, scores, state)
            if p[draft.ids[place]] >= self._share * p.max():
                return state.plus(draft.ids[place])
        return self._sampler.step(state, scores)


def decode(
    setting: Setting,
    prompts: Sequence[int],
    speculation: Speculation,
    judge: Callable[[Sampler], Judge] | None = None,
    seen: list[tuple[np.ndarray, np.ndarray]] | None = None,
) -> list[Told]:
    """One sound for each prompt. `judge`: another than `speculation` asks for; `seen` takes up p and q of each judged place."""
    return [_sound(setting, int(prompt), n, speculation, judge, seen) for n, prompt in enumerate(prompts)]


def _sound(
    setting: Setting,
    prompt: int,
    number: int,
    speculation: Speculation,
    judge: Callable[[Sampler], Judge] | None,
    seen: list[tuple[np.ndarray, np.ndarray]] | None,
) -> Told:
    request = Request(
        ids=(prompt,),
        max_tokens=setting.length,
        sampling=Sampling(temperature=setting.temperature),
        seed=fold(setting.seed, "sound", number),
        speculation=speculation,
    )
    sampler = Sampler(request)
    judged_by = judge_of(request, sampler) if judge is None else judge(sampler)
    choose = chooser_of(request, sampler)
    told, state = Told([]), State(request.ids)
    unread, drafted_from = [prompt], (None, [prompt])  # what target and draft have not read, and from where
    from_here = None
    while len(state.output) < setting.length:
        most = min(GUESSES, setting.length - len(state.output) - 1)
        draft, places = _guesses(setting.draft, state, most, choose, *drafted_from)
        scores, states = setting.target.read([*unread, *draft.ids], from_here)
        scores, states = scores[len(unread) - 1 :], states[len(unread) - 1 :]
        told.calls += 1
        for place in range(len(draft) + 1):
            p = law(sampler, scores[place], state)
            if seen is not None and place < len(draft) and draft.probabilities is not None:
                seen.append((p, draft.probabilities[place]))
            state = judged_by.step(state, scores[place], draft, place)
            token = state.output[-1]
            told.distance += float(setting.apart[token] @ p) / setting.length
            told.judged += place < len(draft)
            if place == len(draft) or token != draft.ids[place]:
                break
            told.kept += 1
        from_here, unread = states[place], [token]
        drafted_from = (places[place], [token]) if place < len(places) else (places[-1], [draft.ids[-1], token])
    told.codes = list(state.output)
    return told


def _guesses(
    model: CodeModel, state: State, most: int, choose: Callable, start: object, unread: list[int]
) -> tuple[Draft, list]:
    """Guesses one after another, and the draft's state before each."""
    ids: list[int] = []
    laws: list[np.ndarray] = []
    scores, states = model.read(unread, start)  # type: ignore[arg-type]
    places = [states[-1]]
    for _ in range(most):
        if ids:
            scores, states = model.read(ids[-1:], places[-1])
            places.append(states[-1])
        token, guessed = choose(scores[-1], state)
        ids.append(token)
        laws.append(guessed)
        state = state.plus(token)
    return Draft(tuple(ids), laws), places
