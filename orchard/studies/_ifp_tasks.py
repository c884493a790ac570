"""Six kinds of exercises with an instruction each, made from a seed. For `ifp`.

A row is an instruction in words, what it is about, a mark, and the answer; only the answer is learnt. Letters are P symbols in a
circle. Every kind can be asked for in several ways, so that the instruction has to be read and is not one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from orchard.core.batch import IGNORED, Batch
from orchard.core.seeds import fold

DOMAINS = ("copy", "reverse", "add", "sort", "caesar", "brackets")
LETTERS = 10
"""Symbols of the circle."""
KINDS = 3
"""Kinds of brackets."""
WAYS = 3
"""Ways to ask for one kind of exercise."""
POLITE = 4
"""Words that say nothing."""
FIRST_BRACKET = LETTERS
FIRST_WORD = FIRST_BRACKET + 2 * KINDS
FIRST_POLITE = FIRST_WORD + WAYS * len(DOMAINS)
MARK, END, PAD = (FIRST_POLITE + POLITE + place for place in range(3))
VOCAB = PAD + 1
LENGTH = 4
"""Symbols that an exercise is about."""
WIDTH = 2 + 1 + LENGTH + 1 + LENGTH + 1
"""Tokens of the longest row."""

Dice = np.random.Generator


def _copy(dice: Dice) -> tuple[list[int], list[int]]:
    x = dice.integers(0, LETTERS, LENGTH).tolist()
    return x, x


def _reverse(dice: Dice) -> tuple[list[int], list[int]]:
    x = dice.integers(0, LETTERS, LENGTH).tolist()
    return x, x[::-1]


def _add(dice: Dice) -> tuple[list[int], list[int]]:
    """Two rows of letters, added letter by letter, modulo their number."""
    half = LENGTH // 2
    a, b = dice.integers(0, LETTERS, (2, half)).tolist()
    return [*a, *b], [(one + other) % LETTERS for one, other in zip(a, b, strict=True)]


def _sort(dice: Dice) -> tuple[list[int], list[int]]:
    x = dice.integers(0, LETTERS, LENGTH).tolist()
    return x, sorted(x)


def _caesar(dice: Dice) -> tuple[list[int], list[int]]:
    """The first letter says how far all others move on."""
    key, *x = dice.integers(0, LETTERS, LENGTH).tolist()
    return [key, *x], [(letter + key) % LETTERS for letter in x]


def _brackets(dice: Dice) -> tuple[list[int], list[int]]:
    """Brackets of several kinds, some of which are closed already: close the others, innermost first."""
    row: list[int] = []
    open_: list[int] = []
    for left in range(LENGTH, 0, -1):
        if open_ and left > 1 and dice.random() < 0.4:
            row.append(FIRST_BRACKET + KINDS + open_.pop())
        else:
            open_.append(int(dice.integers(KINDS)))
            row.append(FIRST_BRACKET + open_[-1])
    return row, [FIRST_BRACKET + KINDS + kind for kind in reversed(open_)]


MAKERS: dict[str, Callable[[Dice], tuple[list[int], list[int]]]] = {
    "copy": _copy,
    "reverse": _reverse,
    "add": _add,
    "sort": _sort,
    "caesar": _caesar,
    "brackets": _brackets,
}


@dataclass(frozen=True)
class Exercises:
    """Rows of one batch, and which kind each is."""

    batch: Batch
    domains: np.ndarray

    def prompt(self, row: int) -> list[int]:
        """The tokens before the answer."""
        ids = self.batch.ids[row].tolist()
        return [int(token) for token in ids[: ids.index(MARK) + 1]]


def exercises(rows: int, seed: int, name: str | int, domain: str | None = None) -> Exercises:
    """Rows of all kinds, or of one; the same name gives the same rows."""
    dice = np.random.default_rng(fold(seed, "exercises", name))
    kinds = dice.integers(0, len(DOMAINS), rows) if domain is None else np.full(rows, DOMAINS.index(domain))
    ids = np.full((rows, WIDTH), PAD)
    targets = np.full((rows, WIDTH), IGNORED)
    for row, kind in enumerate(kinds):
        given, answer = MAKERS[DOMAINS[kind]](dice)
        polite = FIRST_POLITE + int(dice.integers(POLITE))
        word = FIRST_WORD + WAYS * int(kind) + int(dice.integers(WAYS))
        prompt = [polite, word, polite] if dice.random() < 0.5 else [word, polite, polite]
        prompt = [*prompt, *given, MARK]
        whole = [*prompt, *answer, END]
        ids[row, : len(whole)] = whole
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    places = np.broadcast_to(np.arange(WIDTH), (rows, WIDTH)).copy()
    batch = Batch(ids, targets, places, np.zeros_like(places), plain=True).to(torch.device("cpu"))
    return Exercises(batch, kinds)
