"""Chats about topics, made from a seed, for `epicache`: who reads one can be asked for any fact of it.

An utterance says one fact in four tokens: value, topic, key, full stop ("red is the car's colour"). A key has another value in
each topic and each chat, so only topic and key together say which fact is meant. Four utterances in a row are about the same
topic. A question is a word for it, a topic and a key ("what is the car's colour"), and the value comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orchard.core.batch import IGNORED, Batch
from orchard.core.seeds import fold
from orchard.generate.memory.episodes import Utterance

TOPICS, KEYS, VALUES = 8, 16, 24
BEGIN, STOP, ASK = range(3)
FIRST_TOPIC = 3
FIRST_KEY = FIRST_TOPIC + TOPICS
FIRST_VALUE = FIRST_KEY + KEYS
VOCAB = FIRST_VALUE + VALUES
FACT = 4
"""Tokens of an utterance."""
TOGETHER = 4
"""Utterances in a row about one topic."""


@dataclass(frozen=True)
class Chat:
    """Facts in the order they are said: [facts, 3] of topic, key and value."""

    facts: np.ndarray

    def tokens(self) -> list[int]:
        return [BEGIN, *(token for fact in self.facts for token in said(fact))]

    def questions(self) -> list[list[int]]:
        """One for each fact."""
        return [asked_for(fact)[:-1] for fact in self.facts]

    def answers(self) -> np.ndarray:
        """The token that each question asks for."""
        found: np.ndarray = FIRST_VALUE + self.facts[:, 2]
        return found


def said(fact: Sequence[int] | np.ndarray) -> list[int]:
    topic, key, value = (int(number) for number in fact)
    return [FIRST_VALUE + value, FIRST_TOPIC + topic, FIRST_KEY + key, STOP]


def asked_for(fact: Sequence[int] | np.ndarray) -> list[int]:
    """A question and its answer."""
    value, topic, key, _ = said(fact)
    return [ASK, topic, key, value]


def chat(facts: int, dice: np.random.Generator) -> Chat:
    """`facts` different facts, a multiple of `TOGETHER`, as evenly spread over the topics as can be."""
    groups = facts // TOGETHER
    topics = dice.permutation(np.arange(groups) % TOPICS)
    keys = [list(dice.permutation(KEYS)) for _ in range(TOPICS)]
    rows = [(topic, keys[topic].pop(), dice.integers(VALUES)) for topic in topics for _ in range(TOGETHER)]
    return Chat(np.array(rows))


def vectors(texts: Sequence[str]) -> np.ndarray:
    """What the chats' embedder knows: topics, and that two and two of them belong together. [N, TOPICS + TOPICS / 2]"""
    made = np.zeros((len(texts), TOPICS + TOPICS // 2))
    for row, text in zip(made, texts, strict=True):
        for word in text.split():
            row[int(word)] += 1
            row[TOPICS + int(word) // 2] += 1
    return made


def utterance(fact: np.ndarray) -> Utterance:
    """Its text is what it is about: the embedder needs no more."""
    return Utterance(str(int(fact[0])), tuple(said(fact)))


def lesson(rows: int, facts: int, asked: int, seed: int, name: str | int) -> Batch:
    """Rows of a chat and then questions about it: only their answers are learnt."""
    dice = np.random.default_rng(fold(seed, "lesson", name))
    length = 1 + FACT * (facts + asked)
    ids, targets = np.zeros((rows, length), np.int64), np.full((rows, length), IGNORED)
    for row in range(rows):
        one = chat(facts, dice)
        again = one.facts[dice.integers(0, facts, asked)]
        ids[row] = [*one.tokens(), *(token for fact in again for token in asked_for(fact))]
        where = 1 + FACT * facts + FACT * np.arange(asked) + 2  # at the key
        targets[row, where] = ids[row, where + 1]
    places = np.broadcast_to(np.arange(length), (rows, length)).copy()
    return Batch(ids, targets, places, np.zeros_like(places), plain=True).to(torch.device("cpu"))
