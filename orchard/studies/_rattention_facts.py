"""Documents of facts that come again far away, made from a seed. For `rattention`.

A document has a map of its own from letters to letters. It is a row of statements of three bytes: `" ab"` says that a leads to b,
`".ac"` that a leads to c in two steps. Letters are asked for again only after some while, so that nothing near by says where they
lead: the last statement about a letter is 2 w to 8 w bytes back, w being the short window of the study. Where a letter leads can
be told only from such a statement; letters and kinds of statements are chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from orchard.core.batch import Batch
from orchard.core.seeds import fold

VOCAB = 256
WIDTH = 3
"""Bytes of a statement."""
ONE, TWO, FIRST = ord(" "), ord("."), ord("a")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What documents are like."""

    letters: int = 12
    window: int = 8
    """w: statements about one letter are 2 w to 8 w bytes apart."""
    two: float = 0.4
    """The share of statements in two steps, once a letter's two steps have been told one by one."""


@dataclass(frozen=True)
class Told:
    """Documents [B, T] and, byte by byte, what is known about the answers among them."""

    batch: Batch
    steps: np.ndarray
    """[B, T]: 1 or 2 where the next byte is an answer in so many steps that was told before, else 0."""
    back: np.ndarray
    """[B, T]: there, how many bytes back the answer was told last (of two steps the one that was told longer ago)."""


def told(facts: Facts, rows: int, length: int, seed: int, name: str | int) -> Told:
    """The same name gives the same documents."""
    dice = np.random.default_rng(fold(seed, "facts", name))
    count = -(-(length + 1) // WIDTH)
    least, most = -(-2 * facts.window // WIDTH), 8 * facts.window // WIDTH
    leads = dice.integers(0, facts.letters, (rows, facts.letters))
    row = np.arange(rows)
    used = -dice.permuted(np.tile(np.arange(facts.letters), (rows, 1)), axis=1) - least
    said = np.full((rows, facts.letters), -1)
    text = np.empty((rows, count, WIDTH), np.int64)
    steps, back = np.zeros((2, rows, count, WIDTH), np.int64)
    for now in range(count):
        age = now - used
        chance = np.where(age >= least, dice.random((rows, facts.letters)), -1.0)
        letter = np.where(age >= most, 2.0 + age, chance).argmax(1)
        via = leads[row, letter]
        known = (said[row, letter] >= 0) & (said[row, via] >= 0)
        two = known & (dice.random(rows) < facts.two)
        answer = np.where(two, leads[row, via], via)
        text[:, now] = np.stack([np.where(two, TWO, ONE), FIRST + letter, FIRST + answer], 1)
        oldest = np.where(two, np.minimum(said[row, letter], said[row, via]), said[row, letter])
        steps[:, now, 1] = np.where(two, 2, said[row, letter] >= 0)
        back[:, now, 1] = np.where(steps[:, now, 1] > 0, WIDTH * (now - oldest), 0)
        said[row[~two], letter[~two]] = now
        used[row, letter] = now
    ids, steps, back = (each.reshape(rows, -1) for each in (text, steps, back))
    places = np.broadcast_to(np.arange(length), (rows, length)).copy()
    batch = Batch(
        ids[:, :length].copy(),
        ids[:, 1 : length + 1].copy(),
        places,
        np.zeros_like(places),
        plain=True,
        full=True,
    ).to(torch.device("cpu"))
    return Told(batch, steps[:, :length], back[:, :length])
