"""Four kinds of text with facts of their own, made from a seed. For `afm-3`.

Each kind has a fixed table of facts that only memory can tell (which word belongs to which) and a syntax: sums of a made-up
arithmetic, nested calls of code, tables of keys and values, sentences. A model of bytes of characters has to know all four
tables; one text needs one of them. Facts are the same for every seed of a study's text: they are what the world is like.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from orchard.core.batch import Batch
from orchard.core.seeds import fold

DOMAINS = ("sums", "code", "table", "english")
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789+=*;:.,(){}[]<>|-_"
VOCAB = len(CHARACTERS)
FACTS = 40
"""Of each kind."""
_ID = {character: place for place, character in enumerate(CHARACTERS)}
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

Dice = np.random.Generator


@cache
def facts(domain: str) -> tuple[tuple[str, str], ...]:
    """What belongs to what, in one kind of text."""
    dice = np.random.default_rng(fold(0, "facts", domain))
    if domain == "sums":
        pairs = dice.permutation(81)[:FACTS]
        return tuple((f"{1 + pair // 9}*{1 + pair % 9}", str(dice.integers(10, 100))) for pair in pairs)
    words = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    keys, values = (dice.permutation(words)[:FACTS] for _ in range(2))
    return tuple(zip(map(str, keys), map(str, values), strict=True))


def _sums(dice: Dice) -> str:
    left, right = _fact("sums", dice)
    return f"{left}={right};"


def _code(dice: Dice) -> str:
    name, inner = _fact("code", dice)
    opened, closed = ("([{<", ")]}>")
    kinds = dice.integers(0, 4, int(dice.integers(1, 3)))
    body = "".join(opened[kind] for kind in kinds) + inner + "".join(closed[kind] for kind in reversed(kinds))
    return f"{name}{body}\n"


def _table(dice: Dice) -> str:
    key, value = _fact("table", dice)
    return f"|{key}: {value}"


def _english(dice: Dice) -> str:
    who, what = _fact("english", dice)
    form = ("{} likes {}. ", "{} has a {}. ", "no {} is {}. ")[int(dice.integers(3))]
    return form.format(who, what)


def _fact(domain: str, dice: Dice) -> tuple[str, str]:
    known = facts(domain)
    return known[int(dice.integers(len(known)))]


SAYINGS: dict[str, Callable[[Dice], str]] = {"sums": _sums, "code": _code, "table": _table, "english": _english}


def text(domain: str, length: int, dice: Dice) -> str:
    """So many characters of one kind, which begin anywhere."""
    said, total = [], 0
    while total < length + 16:
        said.append(SAYINGS[domain](dice))
        total += len(said[-1])
    start = int(dice.integers(0, 16))
    return "".join(said)[start : start + length]


def ids_of(characters: str) -> list[int]:
    return [_ID[character] for character in characters]


def rows(
    count: int,
    length: int,
    seed: int,
    name: str | int,
    domain: str | None = None,
    switch: int | None = None,
    share: float = 0.0,
) -> Batch:
    """Rows of text, each of one kind. A `share` of them changes to another kind at the place `switch`."""
    dice = np.random.default_rng(fold(seed, "text", name))
    ids = []
    for _ in range(count):
        kind = domain if domain is not None else DOMAINS[int(dice.integers(len(DOMAINS)))]
        if switch is not None and dice.random() < share:
            others = [other for other in DOMAINS if other != kind]
            said = text(kind, switch, dice) + text(others[int(dice.integers(3))], length + 1 - switch, dice)
        else:
            said = text(kind, length + 1, dice)
        ids.append(ids_of(said))
    table = np.asarray(ids)
    places = np.broadcast_to(np.arange(length), (count, length)).copy()
    made = Batch(table[:, :-1].copy(), table[:, 1:].copy(), places, np.zeros_like(places), plain=True, full=True)
    return made.to(torch.device("cpu"))
