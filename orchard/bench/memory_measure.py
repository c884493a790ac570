"""One conversation through one memory: what is right, how soon, how fast, in how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchard.bench.memory_policies import Encoded, Memory
from orchard.bench.memory_tasks import Question

DECODE_QUESTIONS = 2
"""After so many questions of a conversation some tokens are written, to see how fast that is."""


@dataclass
class Outcome:
    """`limit`: tokens that a layer may hold; `peak`: the most that one held."""

    budget: int = 0
    limit: int = 0
    peak: int = 0
    tokens: int = 0
    read_tokens: int = 0
    nbytes: int = 0
    right: list[bool] = field(default_factory=list)
    hear: float = 0.0
    first: list[float] = field(default_factory=list)
    """Seconds from a question to the scores of the first token of an answer."""
    decode: list[float] = field(default_factory=list)
    """Tokens a second."""


@dataclass(frozen=True)
class Asked:
    """A question in tokens."""

    text: str
    prompt: list[int]
    choices: list[list[int]]
    answer: int

    @classmethod
    def of(cls, tokenizer: Any, question: Question) -> Asked:
        choices = [tokenizer.encode(one) for one in question.choices]
        return cls(question.text, tokenizer.encode(question.prompt), choices, question.answer)

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(one) for one in self.choices)


def measure(
    memory: Memory, talk: Encoded, questions: Sequence[Asked], *, decode: int, tell: Callable[[], None] = lambda: None
) -> Outcome:
    """Hear the conversation, then answer every question from what is left of it."""
    kept = memory.kept
    found = Outcome(budget=kept.budget, limit=kept.budget + kept.block, tokens=len(talk.tokens))
    started = time.perf_counter()
    memory.hear(talk)
    found.hear = time.perf_counter() - started
    found.read_tokens = memory.read_tokens
    _look(memory, found)
    tell()
    for number, question in enumerate(questions):
        started = time.perf_counter()
        memory.turn(question.text)
        scores = memory.read(question.prompt, wanted=1)[0]
        found.first.append(time.perf_counter() - started)
        worth = likelihoods(memory, scores, question.choices)
        found.right.append(int(np.argmax(worth)) == question.answer)
        if decode and number < DECODE_QUESTIONS:
            memory.turn(question.text)
            found.decode.append(_decoded(memory, question.prompt, decode))
        _look(memory, found)
        tell()
    return found


def likelihoods(memory: Memory, scores: np.ndarray, choices: Sequence[Sequence[int]]) -> list[float]:
    """The mean log-likelihood of a token of each choice, after what has been read; `scores` [V] are those of its first token."""
    first = _log_softmax(scores[None])[0]
    after: dict[str, np.ndarray] | None = None
    found = []
    for choice in choices:
        total = float(first[choice[0]])
        if len(choice) > 1:
            if after is None:
                after = memory.kept.save()
            rest = _log_softmax(memory.read(list(choice[:-1]), wanted=len(choice) - 1))
            memory.kept.load(after)
            total += float(rest[np.arange(len(choice) - 1), list(choice[1:])].sum())
        found.append(total / len(choice))
    return found


def _decoded(memory: Memory, prompt: Sequence[int], count: int) -> float:
    token = int(memory.read(prompt, wanted=1)[0].argmax())
    started = time.perf_counter()
    for _ in range(count):
        token = int(memory.read([token], wanted=1)[0].argmax())
    return count / (time.perf_counter() - started)


def _look(memory: Memory, found: Outcome) -> None:
    found.peak = max(found.peak, memory.peak)
    found.nbytes = max(found.nbytes, memory.kept.nbytes)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    high = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    made: np.ndarray = high - np.log(np.exp(high).sum(-1, keepdims=True))
    return made
