"""A fallback for where no embedding model is at hand: vectors of hashed words, rare ones counting more.

It knows words and not meanings: two texts are alike when they share words. Whoever uses it should say so; `name` is there for
that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.memory.episodes import normalised

WORD = re.compile(r"\w+")


class Lexical:
    """Texts to vectors [N, width]. `learn` says how rare words are; without it all count the same."""

    name = "lexical (words, without meaning)"

    def __init__(self, width: int = 512) -> None:
        if width < 2:
            raise UsageError(f"vectors of {width} numbers tell nothing apart", hint="use a few hundred")
        self.width = width
        self._texts = 0
        self._with: Counter[int] = Counter()

    def learn(self, texts: Sequence[str]) -> None:
        """Count in how many of these texts each word is; what was learnt before is forgotten."""
        self._texts, self._with = len(texts), Counter()
        for text in texts:
            self._with.update(set(self._places(text)))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        made = np.zeros((len(texts), self.width))
        for row, text in zip(made, texts, strict=True):
            for place, count in Counter(self._places(text)).items():
                # Two words that fall on one place may have different signs, and then rather cancel than add.
                sign = 1.0 if place % 2 else -1.0
                row[place // 2 % self.width] += sign * (1 + math.log(count)) * self._rare(place)
        return normalised(made).astype(np.float32)

    def _rare(self, place: int) -> float:
        return math.log((1 + self._texts) / (1 + self._with[place])) + 1 if self._texts else 1.0

    @staticmethod
    def _places(text: str) -> list[int]:
        return [crc32(word.encode()) for word in WORD.findall(text.lower())]
