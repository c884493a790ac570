"""Words by what they mean to a guard: `bomb` and `grenade` are of one class, `murder` and `strangle` of another.

A classifier that sees classes beside words knows at once what a word does that it met in few sentences or in none. The
classes are in `lexicon.json`: single words or phrases with commas between them. Words are compared by their stems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Words of no class: they are there so that letters without gaps can be taken apart.
COMMON = "common"
_ENDINGS = {"s": ("ings", "ies", "es", "s"), "g": ("ing",), "d": ("ied", "ed")}


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """A word without its ending: rough, and the same for all forms of most verbs and nouns."""
    if len(word) < 4 or word.endswith("ss"):
        return word
    ending = ""
    for candidate in _ENDINGS.get(word[-1], ()):
        if word.endswith(candidate) and len(word) - len(candidate) >= 3:
            ending = candidate
            break
    root = word[: len(word) - len(ending)] + ("y" if ending.startswith("ie") else "")
    if root[-1] == root[-2] and len(root) > 3:
        return root[:-1]  # robbed: rob
    if len(root) == 3 and ending in ("ing", "ed") and root[-1] not in "aeiouwxy" and root[-2] in "aeiou":
        return root + "e"  # making: make
    return root[:-1] if len(root) > 4 and root.endswith("e") else root


class Lexicon:
    """`words`: every known word; `classes(stems)`: where which class is."""

    def __init__(self, classes: dict[str, str]) -> None:
        self.words = frozenset(" ".join(classes.values()).replace(",", " ").split())
        stems = {word: stem(word) for word in self.words}
        self._stems = frozenset(stems.values())
        # Phrases as single texts: thousands of small lists would cost more to make than everything else here.
        self._classes: dict[str, str] = {}
        self._longest: dict[str, int] = {}
        for name, text in classes.items():
            for entry in text.split(",") if name != COMMON else ():
                words = [stems[word] for word in entry.split()]
                if words:
                    phrase = " ".join(words)
                    self._classes[phrase] = f"{self._classes[phrase]} {name}" if phrase in self._classes else name
                    self._longest[words[0]] = max(self._longest.get(words[0], 0), len(words))

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and (word in self.words or (len(word) > 4 and stem(word) in self._stems))

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def classes(self, stems: list[str]) -> list[tuple[int, str]]:
        """Position and class of everything known, in order; of phrases that begin at one word the longest of a class."""
        seen: dict[tuple[int, str], None] = {}
        for start, word in enumerate(stems):
            for length in range(self._longest.get(word, 0), 0, -1):
                for name in self._classes.get(" ".join(stems[start : start + length]), "").split():
                    seen[start, name] = None
        return list(seen)


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    return Lexicon(json.loads((HERE / "lexicon.json").read_text(encoding="utf-8")))
