"""Models that are functions of their tokens, and a loop that speaks with guesses: all of speculation but the engine.

Scores come from what a slot holds, so a guess that was not taken back, or a token that was fed twice, changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.protocol import Held, State, Use, Work
from orchard.generate.request import Request
from orchard.generate.sampling import Sampler
from orchard.generate.speculative.accept import judge_of
from orchard.generate.speculative.drafting import Draft
from orchard.generate.speculative.speculator import Speculator


class Shape:
    def __init__(self, vocab: int, context: int) -> None:
        self.vocab = vocab
        self.context = context


class Synthetic:
    """Scores that depend on the last few tokens. `noise`: how far from those of the same seed without noise."""

    def __init__(
        self, vocab: int, *, seed: int = 0, noise: float = 0.0, spread: float = 2.0, past: int = 3, context: int = 4096
    ) -> None:
        self.config = Shape(vocab, context)
        self.seed, self.noise, self.spread, self.past = seed, noise, spread, past
        self.made: list[SyntheticSlots] = []
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def scores(self, tokens: Sequence[int]) -> np.ndarray:
        past = tuple(tokens[-self.past :])
        if past not in self._known:
            clean = self._numbers("clean", past)
            self._known[past] = (self.spread * (clean + self.noise * self._numbers("noise", past))).astype(np.float32)
        return self._known[past]

    def slots(self, count: int) -> SyntheticSlots:
        self.made.append(SyntheticSlots(self, count))
        return self.made[-1]

    def _numbers(self, what: str, past: tuple[int, ...]) -> np.ndarray:
        digest = hashlib.sha256(repr((what, self.seed, past)).encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little")).normal(size=self.config.vocab)


class SyntheticSlots:
    """Holds tokens, and whether each was read as a prompt; refuses what the contract rules out."""

    def __init__(self, model: Synthetic, count: int) -> None:
        self.model = model
        self.count = count
        self.goes_back, self.copies = True, False
        self.lengths = [0] * count
        self.held: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.calls = 0
        self.broken: set[int] = set()
        """Slots of calls that failed: they can only be closed."""
        self.fail = 0
        """Calls from now on that fail."""

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        assert 0 <= slot < self.count and slot not in self.held
        self.held[slot], self.room[slot], self.prompts[slot] = [], length, 0
        return 0

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        self.calls += 1
        assert not self.broken & {one.slot for one in work}
        if self.fail:
            self.fail -= 1
            self.broken |= {one.slot for one in work}
            raise UsageError("no memory for this step", hint="ask for less")
        assert work and len({one.slot for one in work}) == len(work) and len({one.prompt for one in work}) == 1
        assert sum(len(one.tokens) for one in work) <= 512 * len(work)
        out = []
        for one in work:
            held = self.held[one.slot]
            assert len(one.tokens) >= max(1, one.wanted)
            if one.prompt:
                assert self.prompts[one.slot] == len(held)
                self.prompts[one.slot] += len(one.tokens)
            held.extend(one.tokens)
            self.lengths[one.slot] = len(held)
            assert len(held) <= self.room[one.slot]
            ends = range(len(held) - one.wanted + 1, len(held) + 1)
            rows = [self.model.scores(held[:end]) for end in ends]
            out.append(np.array(rows, np.float32).reshape(one.wanted, self.model.config.vocab))
        return out

    def back(self, slot: int, tokens: int) -> None:
        assert self.prompts[slot] <= tokens <= len(self.held[slot])
        del self.held[slot][tokens:]
        self.lengths[slot] = tokens

    def close(self, slot: int) -> None:
        del self.held[slot], self.room[slot], self.prompts[slot]
        self.lengths[slot] = 0
        self.broken.discard(slot)

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def hidden(self, slot: int) -> np.ndarray | None:
        return None

    def nbytes(self, length: int) -> int:
        return 0


class Talker:
    """A row without text."""

    def __init__(self, key: int, request: Request, ends: Sequence[int] = ()) -> None:
        self.key = key
        self.request = request.seeded()
        self.limit = request.max_tokens
        self.state = State(self.request.ids)
        self.sampler = Sampler(self.request)
        self.finished = False
        self.calls = 0
        self.drafts: list[Draft] = []
        self._judge = judge_of(self.request, self.sampler)
        self._ends = frozenset(ends)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.state.output)

    def take_many(self, model: Synthetic, draft: Draft) -> int:
        """Judge a draft by the model's scores; how many guesses came true."""
        self.calls += 1
        self.drafts.append(draft)
        given = [*self.state.prompt, *self.state.output, *draft.ids]
        start = len(given) - len(draft)
        for place in range(len(draft) + 1):
            self.state = self._judge.step(self.state, model.scores(given[: start + place]), draft, place)
            token = self.state.output[-1]
            self.finished = token in self._ends or len(self.state.output) >= self.limit
            kept = place < len(draft) and token == draft.ids[place]
            if not kept or self.finished:
                return place + kept
        raise AssertionError("more tokens than scores")


def speak(
    model: Synthetic, requests: Sequence[Request], speculator: Speculator | None = None, ends: Sequence[int] = ()
) -> list[Talker]:
    """All answers, together, with guesses where requests ask for them."""
    talkers = [Talker(key, request, ends) for key, request in enumerate(requests)]
    speculator = speculator or Speculator(model, ends=ends)
    for talker in talkers:  # the first token comes with the prompt
        talker.take_many(model, Draft())
    while live := [talker for talker in talkers if not talker.finished]:
        for talker, draft in zip(live, speculator.drafts(live), strict=True):
            assert len(draft) <= talker.limit - len(talker.output) - 1
            speculator.settle(talker, draft, talker.take_many(model, draft))
            if talker.finished:
                speculator.forget(talker.key)
    return talkers
