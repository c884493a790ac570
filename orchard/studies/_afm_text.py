"""A made-up language for the `afm` studies: endless text with something to learn at every distance, from a seed and nothing
else.

Paragraphs talk about one of some subjects, each with favourite words; nouns and verbs agree in number, names come back
later in their paragraph. Between them stand records (JSON, of which some values depend on others) and sums of small
numbers. The language itself never changes; a seed only says what is written in it. One token is one character.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache

import numpy as np

from orchard.text.loaded import Loaded
from orchard.text.tokenizer import Tokenizer

VOCAB = 128
"""All of ASCII; 0 begins and ends a text."""
END = 0
SUBJECTS = 8
_ONSETS = ("b", "br", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "sh", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "n", "l", "r", "m", "sk", "nd", "t")
_COUNTS = {"noun": 160, "verb": 96, "adjective": 96, "name": 48, "town": 24, "adverb": 24}


class Language:
    """Words by kind, the likelier first, and how the subjects like them."""

    def __init__(self) -> None:
        chance = random.Random(20240731)
        used: set[str] = set()
        self.words: dict[str, list[str]] = {}
        for kind, count in _COUNTS.items():
            found: list[str] = []
            while len(found) < count:
                word = "".join(
                    chance.choice(_ONSETS) + chance.choice(_VOWELS) + chance.choice(_CODAS)
                    for _ in range(chance.choice((1, 2, 2, 3)))
                )
                if word not in used and not word.endswith("s"):
                    used.add(word)
                    found.append(word.capitalize() if kind in ("name", "town") else word)
            self.words[kind] = found
        self.weights = {
            kind: [
                [(12.0 if chance.random() < 0.12 else 1.0) / (rank + 2) for rank in range(count)]
                for _ in range(SUBJECTS)
            ]
            for kind, count in _COUNTS.items()
        }
        self.home = {name: chance.choice(self.words["town"]) for name in self.words["name"]}

    def pick(self, chance: random.Random, kind: str, subject: int) -> str:
        return chance.choices(self.words[kind], self.weights[kind][subject])[0]

    def paragraph(self, chance: random.Random) -> str:
        subject = chance.randrange(SUBJECTS)
        names = [self.pick(chance, "name", subject) for _ in range(2)]
        return " ".join(self._sentence(chance, subject, names) for _ in range(chance.randint(2, 5))) + "\n"

    def _sentence(self, chance: random.Random, subject: int, names: list[str]) -> str:
        form = chance.random()
        if form < 0.35:
            who, many = chance.choice(names), False
        else:
            many = chance.random() < 0.4
            adjective = self.pick(chance, "adjective", subject) + " " if chance.random() < 0.5 else ""
            who = f"the {adjective}{self.pick(chance, 'noun', subject)}" + ("s" if many else "")
        verb = self.pick(chance, "verb", subject) + ("" if many else "s")
        adverb = " " + self.pick(chance, "adverb", subject) if chance.random() < 0.3 else ""
        if chance.random() < 0.3:
            what = f"near {self.home[chance.choice(names)]}"
        else:
            count = chance.choice(("a", "one", "two", "some"))
            noun = self.pick(chance, "noun", subject)
            what = f"{count} {noun}" + ("s" if count in ("two", "some") else "")
        said = f"{who} {verb}{adverb} {what}."
        return said[0].upper() + said[1:]

    def record(self, chance: random.Random) -> str:
        """A person: the town follows from the name, the tags from one subject."""
        name, subject = chance.choice(self.words["name"]), chance.randrange(SUBJECTS)
        tags = [self.pick(chance, "noun", subject) for _ in range(chance.randint(1, 2))]
        facts = {"name": name, "age": chance.randint(1, 99), "town": self.home[name], "tags": tags}
        return json.dumps(facts, separators=(",", ":")) + "\n"

    @staticmethod
    def sums(chance: random.Random) -> str:
        pairs = [(chance.randint(0, 49), chance.randint(0, 49)) for _ in range(chance.randint(1, 4))]
        return " ".join(f"{a}+{b}={a + b}" for a, b in pairs) + "\n"

    def text(self, seed: int, length: int) -> str:
        """`length` characters of it."""
        chance, parts, found = random.Random(seed), [], 0
        while found < length:
            kind = chance.random()
            part = self.paragraph(chance) if kind < 0.55 else self.record(chance) if kind < 0.8 else self.sums(chance)
            parts.append(part)
            found += len(part)
        return "".join(parts)[:length]


@lru_cache(maxsize=1)
def language() -> Language:
    return Language()


def ids_of(text: str) -> np.ndarray:
    """Characters as token ids."""
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """One token for each character of ASCII; 0 ends an answer."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    spelt = _byte_letters()
    backend = Backend(models.BPE(vocab={spelt[place]: place for place in range(1, VOCAB)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        Loaded(
            backend=backend,
            vocab_size=VOCAB,
            control_ids=frozenset({END}),
            bos_id=None,
            eos_id=END,
            eos_ids=frozenset({END}),
            add_bos=False,
            chat_template=None,
        )
    )


def _byte_letters() -> dict[int, str]:
    """How byte-level vocabularies spell bytes: printable ones as they are, all others by letters from 256 on, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + place) for place, byte in enumerate(other)}}
