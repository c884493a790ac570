"""Where the texts of control tokens occur in a string."""

from __future__ import annotations

import re
from typing import NamedTuple


class Found(NamedTuple):
    start: int
    end: int
    token_id: int


class ControlFinder:
    """Leftmost, longest matches, as tokenizers themselves look for them. A vocabulary may have thousands of control
    tokens, so candidates are found by first character and looked up by length."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self.tokens = {text: token_id for text, token_id in tokens.items() if text}
        self.edge_characters = frozenset(c for text in self.tokens for c in (text[0], text[-1]))
        self.characters = frozenset("".join(self.tokens))
        self._lengths: dict[str, list[int]] = {}
        for text in self.tokens:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        self._first = re.compile("[" + "".join(map(re.escape, sorted(self._lengths))) + "]") if self.tokens else None

    def find(self, text: str) -> list[Found]:
        found: list[Found] = []
        at = 0
        while self._first is not None and (candidate := self._first.search(text, at)):
            at = candidate.start()
            for length in self._lengths[candidate[0]]:
                token_id = self.tokens.get(text[at : at + length])
                if token_id is not None:
                    found.append(Found(at, at + length, token_id))
                    at += length
                    break
            else:
                at += 1
        return found
