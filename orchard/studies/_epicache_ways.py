"""Ways to keep an eighth of a chat, and how well facts can then be looked up. For `epicache`.

Every way reads the same chat in the same blocks under the same budget, ends at the budget, and is asked for every fact.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from orchard.core.context import Context
from orchard.generate.memory.episodic import EpisodicMemory, prefill
from orchard.generate.memory.sensitivity import drift, layer_budgets
from orchard.generate.memory.torch_kept import TorchKept
from orchard.models.language import Decoder
from orchard.studies._epicache_chats import BEGIN, FACT, TOGETHER, Chat, utterance, vectors
from orchard.studies._epicache_model import Size

Told = np.ndarray
"""Log-probabilities [questions, V] of answers."""


@dataclass
class Reader:
    """One model, one chat; counts what its caches held."""

    model: Decoder
    size: Size
    chat: Chat
    peak: int = 0
    read: int = 0
    looked: int = 0
    budgets: list[int] | None = field(default=None)

    @property
    def budget(self) -> int:
        return FACT * self.size.facts // self.size.compression

    def kept(self, scoring: Any, **more: Any) -> TorchKept:
        given = {"budget": self.budget, "block": self.budget, "sinks": self.size.sinks} | more
        return TorchKept(self.model, scoring=scoring, **given)

    # Ways ---------------------------------------------------------------------------------------------------------------

    def full(self) -> Told:
        tokens = self.chat.tokens()
        kept = self.kept("recent", budget=len(tokens))
        kept.read(tokens)
        assert kept.used == len(tokens)
        return ask(kept, self.chat.questions())

    def alone(self, scoring: str) -> Told:
        """By a rule that needs no prompt."""
        kept = self.kept(scoring)
        kept.read(self.chat.tokens())
        kept.evict()
        return self._asked(kept)

    def zipped(self, *, whole: bool) -> Told:
        """The block is repeated after itself, or all that was read so far."""
        kept, past = self.kept("probe"), list[int]()

        def again(block: Sequence[int]) -> Sequence[int]:
            past.extend(block)
            return list(past) if whole else block

        prefill(kept, self.chat.tokens(), again)
        return self._asked(kept)

    def episodic(self, episodes: int = 4, prompts: dict[int, list[int]] | None = None) -> Told:
        """EpiCache; `prompts`: other words than the medoids look, by episode."""
        memory = Prompted(
            self.kept("probe", budgets=self.budgets),
            vectors,
            begin=[BEGIN],
            episodes=episodes,
            medoids=self.size.medoids,
            segment=TOGETHER,
            budgets=self.budgets,
        )
        memory.prompts = prompts or {}
        memory.add([utterance(fact) for fact in self.chat.facts])
        memory.build()
        self.read, self.looked = memory.tokens_read, memory.tokens_looked
        told = np.zeros((len(self.chat.facts), self.model.config.vocab))
        questions, by_episode = self.chat.questions(), dict[int, list[int]]()
        for place, fact in enumerate(self.chat.facts):
            by_episode.setdefault(memory.select(str(int(fact[0]))), []).append(place)
        for places in by_episode.values():
            memory.select(str(int(self.chat.facts[places[0], 0])))
            told[places] = ask(memory.kept, [questions[place] for place in places])  # type: ignore[arg-type]
        self._note(memory.peak)
        return told

    def random(self, dice: np.random.Generator) -> Told:
        """As EpiCache, but segments drawn from anywhere look."""
        segments = self.chat.facts.reshape(-1, TOGETHER, 3)
        prompts = {}
        for number in range(4):
            drawn = np.sort(dice.choice(len(segments), min(self.size.medoids, len(segments)), replace=False))
            prompts[number] = [token for fact in segments[drawn].reshape(-1, 3) for token in utterance(fact).tokens]
        return self.episodic(4, prompts)

    def oracle(self, places: Sequence[int]) -> Told:
        """A cache for each of these questions, made by the question itself."""
        told = []
        for place in places:
            question = self.chat.questions()[place]
            kept = self.kept("probe")
            prefill(kept, self.chat.tokens(), lambda _, question=question: question)  # type: ignore[misc]
            told.append(self._asked(kept, [question])[0])
        return np.stack(told)

    def allocated(self, budgets: list[int]) -> Told:
        """EpiCache with more room in some layers than in others, and the same in all."""
        self.budgets = budgets
        try:
            return self.episodic()
        finally:
            self.budgets = None

    # Inside -------------------------------------------------------------------------------------------------------------

    def _asked(self, kept: TorchKept, questions: list[list[int]] | None = None) -> Told:
        assert kept.used <= self.budget
        self._note(kept.peak)
        return ask(kept, questions or self.chat.questions())

    def _note(self, peak: int) -> None:
        if self.budgets is None:  # with budgets by layer, the store's own assertion holds each to its own
            self.peak = max(self.peak, peak)


class Prompted(EpisodicMemory):
    """With other words to look for some episodes."""

    prompts: dict[int, list[int]]

    def prompt(self, number: int) -> list[int]:
        return self.prompts[number] if number in self.prompts else super().prompt(number)


@torch.inference_mode()
def ask(kept: TorchKept, questions: list[list[int]]) -> Told:
    """All questions at once, each by itself: they look at the same cache and leave nothing in it."""
    cache = copy.deepcopy(kept.cache)
    cache.keep(torch.zeros(len(questions), dtype=torch.long))
    ids = torch.tensor(questions, device=kept.model.device)
    places = (kept.length + torch.arange(ids.shape[1], device=ids.device)).expand(ids.shape)
    hidden = kept.model.hidden(ids, Context(places, cache=cache, probe=True))[:, -1]
    told: np.ndarray = functional.log_softmax(kept.model.scores(hidden).float(), -1).cpu().numpy().astype(np.float64)
    return told


def by_drift(model: Decoder, size: Size, chat: Chat, alpha: float) -> list[int]:
    """Budgets by layer from one chat that nobody is asked about."""
    budget = FACT * size.facts // size.compression
    found = drift(model, chat.tokens(), window=budget, sinks=size.sinks)
    return layer_budgets(found, budget, alpha=alpha, least=size.sinks + 1)


def divergence(full: Told, other: Told) -> float:
    """Nats from the full cache's answers, the mean over questions."""
    return float((np.exp(full) * (full - other)).sum(-1).mean())
