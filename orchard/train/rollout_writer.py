"""Who writes answers: takes weights with a version, gives finished groups.

`Writer` is all that the source of rollouts knows of it. `EngineWriter` writes in this process, at the moment it is asked, with
the model that is trained. One that writes elsewhere (in a thread, on other machines) would take a copy of the weights in
`moved`, begin in `ask` and wait in `take`: the source asks `lag` rounds ahead of what it takes, so there is something to do while
the model learns. Each round is written with the weights that were there when it was asked for, so how stale a batch is does not
depend on how quick anybody was, and the same seed gives the same run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, OrchardError, UsageError
from orchard.generate.engine import Engine
from orchard.generate.request import Request, Sampling
from orchard.train.rollout_groups import Group, Question, Written
from orchard.train.rollout_runners import RUNNERS, Tempered, TogetherRunner, whole

Score = Callable[[Question, str, tuple[int, ...]], tuple[float, ...]]
"""What an answer (its text, its tokens) is worth, checked."""


class RolloutFailed(OrchardError):
    """An answer broke off for a reason of the model's: its scores are no numbers, or there is no memory."""

    code = "rollout-failed"


@dataclass(frozen=True)
class Manner:
    """How answers are written."""

    max_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()


class Writer(ABC):
    """The contract. Calls come from one thread. `version` counts the updates that the weights have seen."""

    @abstractmethod
    def follow(self, model: Any, device: torch.device) -> None:
        """The model whose weights are to be used from now on."""

    @abstractmethod
    def moved(self, version: int) -> None:
        """The weights have changed: what is asked for from now on is written with these, and nothing that was worked out with
        older ones (keys, values, prefixes, packed weights) is used for it."""

    @abstractmethod
    def ask(self, questions: Sequence[Question]) -> None:
        """Begin a round: groups of answers to these questions, by the weights of this moment."""

    @abstractmethod
    def take(self) -> list[Group]:
        """The oldest round that was asked for and not taken yet, finished, in the order of its questions."""

    @abstractmethod
    def close(self) -> None:
        """The end: what is under way is given up."""


class EngineWriter(Configurable, Writer):
    """Writes in this process, when it is asked."""

    @config
    class Config(BaseConfig):
        runner: str = "together"
        """What runs the model. `together`: torch, all answers in one call for each token. `alone`: torch, one answer at a time,
        so that its bits do not depend on how many processes share the work. `plan`: the native engine, from a plan that is
        lowered for each round; it rounds differently, which the ratios then make up for. `auto`: a plan on a CPU, where the
        model has one, otherwise together. docs/rollouts.md has figures."""
        slots: int = 64
        """Answers at a time; more wait."""
        threads: int | None = field(default=None)
        """Of the native engine."""

    def __init__(self, cfg: Config, *, tokenizer: Any, manner: Manner, score: Score) -> None:
        if cfg.runner not in RUNNERS:
            raise ConfigError(f"no runner is called {cfg.runner!r}", hint="use one of " + ", ".join(RUNNERS))
        if cfg.slots < 1:
            raise ConfigError(f"slots is {cfg.slots}", hint="use a whole number from 1")
        self.config = cfg
        self.tokenizer = tokenizer
        self.manner = manner
        self.score = score
        self.version = 0
        self._model: Any = None
        self._done: deque[list[Group]] = deque()

    def follow(self, model: Any, device: torch.device) -> None:
        self._model = model

    def moved(self, version: int) -> None:
        """Nothing has to be thrown away: an engine lives for one round, and with it all that it worked out."""
        self.version = version

    def ask(self, questions: Sequence[Question]) -> None:
        if self._model is None:
            raise UsageError("nobody said which model writes the answers", hint="call follow(model, device) first")
        with sampling(self._model):
            self._done.append(self._round(questions))

    def take(self) -> list[Group]:
        return self._done.popleft()

    def close(self) -> None:
        """Nothing runs between calls."""

    # Inside -------------------------------------------------------------------------------------------------------------

    def _round(self, questions: Sequence[Question]) -> list[Group]:
        requests = [self._request(question, seed) for question in questions for seed in question.seeds]
        if not requests:
            return []
        longest = max(len(request.ids) for request in requests) + self.manner.max_tokens
        length = min(longest, self._model.config.context)
        slots = min(self.config.slots, len(requests))
        runner = RUNNERS[self.config.runner](self._model, length, self.config.threads)
        # Beginnings are not kept: there is no later round that could use them.
        engine = Engine(
            Tempered(runner, self.manner.temperature),
            self.tokenizer,
            prefill_chunk=max(512, slots * length) if isinstance(runner, TogetherRunner) else 512,
            prefix_bytes=0,
            slots=slots,
        )
        answers = _Answers(len(requests))
        for index, piece in engine.run(requests):
            answers.add(index, piece)
        groups, at = [], 0
        for question in questions:
            members = [self._written(question, answers, at + member) for member in range(len(question.seeds))]
            groups.append(Group(question.number, question.ids, tuple(members), self.version, question.row.place))
            at += len(question.seeds)
        return groups

    def _request(self, question: Question, seed: int) -> Request:
        # The temperature is in the scores already: what is reported is then the law that was sampled from.
        return Request(
            question.ids,
            max_tokens=self.manner.max_tokens,
            sampling=Sampling(temperature=1.0),
            stop=self.manner.stop,
            seed=seed,
            logprobs=0,
        )

    def _written(self, question: Question, answers: _Answers, index: int) -> Written:
        finish, error = answers.ends[index]
        if finish == "error":
            raise RolloutFailed(
                f"an answer to {question.row.place or f'prompt {question.number}'} broke off: {error}",
                hint="go on from the last checkpoint with a lower learning rate, or give fewer slots or tokens at a time",
            )
        ids, text = tuple(answers.ids[index]), "".join(answers.texts[index])
        rewards = self.score(question, text, ids)
        return Written(ids, tuple(answers.log_probs[index]), text, finish, rewards)


class _Answers:
    """Pieces put together. Unlike an engine's `Answer` these keep the end token: that the answer ends there was chosen, too."""

    def __init__(self, count: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.log_probs: list[list[float]] = [[] for _ in range(count)]
        self.texts: list[list[str]] = [[] for _ in range(count)]
        self.ends: list[tuple[str, str | None]] = [("", None)] * count

    def add(self, index: int, piece: Any) -> None:
        if piece.logprob is not None:
            self.ids[index].append(piece.logprob.id)
            self.log_probs[index].append(piece.logprob.logprob)
        self.texts[index].append(piece.text)
        if piece.finish is not None:
            self.ends[index] = (piece.finish, piece.error)


@contextmanager
def sampling(model: Any) -> Iterator[None]:
    """A model that is being trained, for as long as it writes: no dropout, and all of it on every process."""
    training = bool(getattr(model, "training", False))
    if training:
        model.eval()
    try:
        # What was compiled for training is not compiled anew for every length of an answer.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), whole(model):
            yield
    finally:
        if training:
            model.train()
