"""Ways to remember a conversation, by name: each hears it once under a budget, and is then asked again and again.

All run on the same `protocol.Kept`, whoever computes. What is heard is brought down to the budget before anything is asked, so
that policies with the same budget answer from the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.memory.episodes import Embed, Utterance
from orchard.generate.memory.episodic import EpisodicMemory, prefill
from orchard.generate.memory.protocol import Kept, Scoring

KeptMaker = Callable[..., Kept]
"""Called with budget, block, sinks and scoring."""


@dataclass(frozen=True)
class Encoded:
    """A conversation in tokens, and the words that may look at it."""

    begin: list[int]
    utterances: list[Utterance]
    repeat: list[int]
    """Asks to repeat what comes next (KVzip)."""
    extract: list[int]
    """Asks for what the next lines are about (EpiCache)."""

    @property
    def tokens(self) -> list[int]:
        return [*self.begin, *(token for one in self.utterances for token in one.tokens)]


@dataclass(frozen=True)
class Settings:
    """What a policy may be told beside its budget."""

    budget: int
    block: int
    sinks: int = 4
    episodes: int = 4
    medoids: int = 4


class Memory(Protocol):
    """A conversation that was heard. `turn` comes before every question and undoes what the last one left behind."""

    kept: Kept
    read_tokens: int
    """Tokens that the model read, all that looked and were not kept among them."""
    peak: int
    """The most tokens that a layer ever held, whatever was undone since."""

    def hear(self, talk: Encoded) -> None: ...

    def turn(self, question: str) -> None: ...

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray: ...


class Scored:
    """One cache; the score decides what stays. With `probe`, each block is repeated to see what of it all matters (KVzip)."""

    def __init__(self, make: KeptMaker, scoring: Scoring, settings: Settings) -> None:
        self.kept = make(budget=settings.budget, block=settings.block, sinks=settings.sinks, scoring=scoring)
        self.scoring = scoring
        self.read_tokens = self.peak = 0
        self._heard: dict[str, np.ndarray] | None = None

    def hear(self, talk: Encoded) -> None:
        tokens = talk.tokens
        self.read_tokens = len(tokens)
        if self.scoring == "probe":
            self.read_tokens += prefill(self.kept, tokens, lambda block: [*talk.repeat, *block])
        else:
            self.kept.read(tokens)
            if self.kept.used > self.kept.budget:
                self.kept.evict()
        self._heard, self.peak = self.kept.save(), self.kept.peak

    def turn(self, question: str) -> None:
        if self._heard is None:
            raise UsageError("nothing was heard yet", hint="let it hear a conversation first")
        self.kept.load(self._heard)

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        found = self.kept.read(tokens, wanted)
        self.peak = max(self.peak, self.kept.peak)
        return found


class Episodic:
    """A cache for each thing that was spoken of (EpiCache)."""

    def __init__(self, make: KeptMaker, embed: Embed, settings: Settings) -> None:
        self.kept = make(budget=settings.budget, block=settings.block, sinks=settings.sinks, scoring="probe")
        self.embed, self.settings = embed, settings
        self.read_tokens = self.peak = 0
        self.memory: EpisodicMemory | None = None

    def hear(self, talk: Encoded) -> None:
        self.memory = EpisodicMemory(
            self.kept,
            self.embed,
            begin=talk.begin,
            instruction=talk.extract,
            episodes=self.settings.episodes,
            medoids=self.settings.medoids,
        )
        self.memory.add(talk.utterances)
        self.memory.build()
        self.read_tokens = self.memory.tokens_read + self.memory.tokens_looked
        self.peak = self.memory.peak

    def turn(self, question: str) -> None:
        if self.memory is None:
            raise UsageError("nothing was heard yet", hint="let it hear a conversation first")
        if self.memory.open is not None:  # what was asked before is no part of the conversation
            self.kept.load(self.memory.shelf.take(self.memory.open))
        self.memory.select(question)

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        found = self.kept.read(tokens, wanted)
        self.peak = max(self.peak, self.kept.peak)
        return found


FULL = "full"
SCORINGS: dict[str, Scoring] = {
    FULL: "recent",
    "recent": "recent",
    "snap": "snap",
    "keydiff": "keydiff",
    "kvzip": "probe",
}
EPISODIC = "episodic"
POLICIES = (*SCORINGS, EPISODIC)
ABOUT = {
    FULL: "everything stays",
    "recent": "the first and the newest tokens (StreamingLLM)",
    "snap": "what the last tokens look at (SnapKV)",
    "keydiff": "keys unlike the others (KeyDiff)",
    "kvzip": "what repeating each block looks at (KVzip)",
    EPISODIC: "a cache for each thing that was spoken of (EpiCache)",
}


def memory(policy: str, make: KeptMaker, embed: Callable[[], Embed], settings: Settings) -> Memory:
    """`embed` is called only where a policy compares texts."""
    if policy == EPISODIC:
        return Episodic(make, embed(), settings)
    if policy not in SCORINGS:
        raise UsageError(f"no policy called {policy!r}", hint="one of " + ", ".join(POLICIES))
    return Scored(make, SCORINGS[policy], settings)


def encoded(tokenizer: Any, begin: str, utterances: Sequence[str]) -> Encoded:
    """A conversation as a model's tokenizer has it. Each utterance by itself, so that every policy reads the same tokens."""
    return Encoded(
        begin=tokenizer.encode(begin, bos=True),
        utterances=[Utterance(line.strip(), tuple(tokenizer.encode(line))) for line in utterances],
        repeat=tokenizer.encode("\nRepeat the lines above:\n"),
        extract=tokenizer.encode("\nRemember what was said about this:\n"),
    )
