"""Chats about topics, made from a seed, for `epicache`: who reads one can be asked for any fact of it.

An utterance says one fact in four tokens: topic, key, "is", value. A key has another value in each topic and each chat, so only
topic and key together say which fact is meant. Four utterances in a row are about the same topic. A question is a fact without
its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orchard.core.batch import IGNORED, Batch
from orchard.core.seeds import fold

TOPICS, KEYS, VALUES = 8, 16, 24
BEGIN, IS = 0, 1
FIRST_TOPIC = 2
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

    def utterances(self) -> list[list[int]]:
        return [said(fact) for fact in self.facts]

    def tokens(self) -> list[int]:
        return [BEGIN, *(token for one in self.utterances() for token in one)]


def said(fact: Sequence[int] | np.ndarray) -> list[int]:
    topic, key, value = (int(number) for number in fact)
    return [FIRST_TOPIC + topic, FIRST_KEY + key, IS, FIRST_VALUE + value]


def chat(facts: int, dice: np.random.Generator) -> Chat:
    """`facts` different facts, a multiple of `TOGETHER`, as evenly spread over the topics as can be."""
    groups = facts // TOGETHER
    topics = dice.permutation(np.arange(groups) % TOPICS)
    keys = [list(dice.permutation(KEYS)) for _ in range(TOPICS)]
    rows = [(topic, keys[topic].pop(), dice.integers(VALUES)) for topic in topics for _ in range(TOGETHER)]
    return Chat(np.array(rows))


def words(tokens: Sequence[int]) -> str:
    """The same as text, for who embeds texts: topics, keys and values are words."""
    names = {BEGIN: "begin", IS: "is"}
    kinds = ((FIRST_VALUE, "value"), (FIRST_KEY, "key"), (FIRST_TOPIC, "topic"))
    return " ".join(
        names.get(token) or next(f"{name}{token - first}" for first, name in kinds if token >= first)
        for token in tokens
    )


def lesson(rows: int, facts: int, asked: int, seed: int, name: str | int) -> Batch:
    """Rows of a chat and then some of its facts once more, in another order: only those values are learnt."""
    dice = np.random.default_rng(fold(seed, "lesson", name))
    length = 1 + FACT * (facts + asked)
    ids, targets = np.zeros((rows, length), np.int64), np.full((rows, length), IGNORED)
    for row in range(rows):
        one = chat(facts, dice)
        again = one.facts[dice.integers(0, facts, asked)]
        ids[row] = [*one.tokens(), *(token for fact in again for token in said(fact))]
        where = 1 + FACT * facts + FACT * np.arange(asked) + FACT - 2  # at "is"
        targets[row, where] = ids[row, where + 1]
    places = np.broadcast_to(np.arange(length), (rows, length)).copy()
    return Batch(ids, targets, places, np.zeros_like(places), plain=True).to(torch.device("cpu"))
