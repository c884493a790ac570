"""Documents of facts that come again far away, made from a seed. For `rattention`.

A document has a map of its own from letters to letters. It is a row of statements of three symbols: a mark, a letter, and the
letter that it leads to in as many steps as the mark says. A letter is asked for again only after some while, so that nothing near
by says where it leads: statements about one letter are 2 w to 8 w symbols apart, w being the short window of the study. Several
steps are asked for only when each of them has been told by itself. Letters and marks are chance; where letters lead is all that
can be learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchard.core.batch import Batch
from orchard.core.seeds import fold
from orchard.studies._afm_ground import device

WIDTH = 3
"""Symbols of a statement."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What documents are like."""

    letters: int
    window: int
    """w."""
    hops: int
    """The most steps that are asked for."""
    more: float = 0.5
    """The share of statements with more than one step, where they can be made."""

    @property
    def vocab(self) -> int:
        return self.hops + self.letters


@dataclass(frozen=True)
class Told:
    """Documents [B, T] and, symbol by symbol, what is known about the answers among them."""

    batch: Batch
    steps: np.ndarray
    """[B, T]: where the next symbol is an answer that was told before, in how many steps; else 0."""
    back: np.ndarray
    """[B, T]: there, how many symbols back it was told (of several steps the one that was told longest ago)."""


def told(facts: Facts, rows: int, length: int, seed: int, name: str | int) -> Told:
    """The same name gives the same documents."""
    dice = np.random.default_rng(fold(seed, "facts", name))
    count = -(-(length + 1) // WIDTH)
    least, most = -(-2 * facts.window // WIDTH), 8 * facts.window // WIDTH
    row = np.arange(rows)
    leads = dice.integers(0, facts.letters, (rows, facts.letters))
    used = -dice.permuted(np.tile(np.arange(facts.letters), (rows, 1)), axis=1) - least
    said = np.full((rows, facts.letters), -1)  # when a letter's one step was told last
    text, steps, back = np.zeros((3, rows, count, WIDTH), np.int64)
    for now in range(count):
        age = now - used
        chance = np.where(age >= least, dice.random((rows, facts.letters)), -1.0)
        letter = np.where(age >= most, 2.0 + age, chance).argmax(1)
        wish = np.where(dice.random(rows) < facts.more, dice.integers(1, facts.hops, rows, endpoint=True), 1)
        hops, answer, oldest = _path(letter, wish, leads, said)
        text[:, now] = np.stack([hops - 1, facts.hops + letter, facts.hops + answer], 1)
        steps[:, now, 1] = np.where(oldest >= 0, hops, 0)
        back[:, now, 1] = np.where(oldest >= 0, WIDTH * (now - oldest), 0)
        plain = hops == 1
        said[row[plain], letter[plain]] = now
        used[row, letter] = now
    whole, marks, far = (each.reshape(rows, -1) for each in (text, steps, back))
    places = np.broadcast_to(np.arange(length), (rows, length)).copy()
    ids, targets = whole[:, :length].copy(), whole[:, 1 : length + 1].copy()
    batch = Batch(ids, targets, places, np.zeros_like(places), plain=True, full=True).to(device())
    return Told(batch, marks[:, :length], far[:, :length])


def _path(
    letter: np.ndarray, wish: np.ndarray, leads: np.ndarray, said: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From each row's letter as many steps as are wished for and have been told, at least one: how many, where that leads, and
    when the step that was told longest ago was told (-1: not yet)."""
    row = np.arange(len(letter))
    oldest, at = said[row, letter], leads[row, letter]
    hops = np.ones_like(letter)
    goes = oldest >= 0
    for step in range(2, int(wish.max()) + 1):
        goes = goes & (wish >= step) & (said[row, at] >= 0)
        oldest = np.where(goes, np.minimum(oldest, said[row, at]), oldest)
        at, hops = np.where(goes, leads[row, at], at), np.where(goes, step, hops)
    return hops, at, oldest
