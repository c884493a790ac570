"""Intent in words: who wants to do what, to whom, and how it is to be hidden.

A rule of `rules.json` is either a row of classes that come near one another (somebody asks how to hurt a person), or a
pattern over the words of a text. `unless` names classes that take a rule back: protection, games, idioms. A rule has a
name, so that a decision can be explained and a wrong one found.
"""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from orchard.core.frozen import frozen

SCORE = 0.9
"""How sure a rule is: above the thresholds of every mode that blocks."""
RULES = Path(__file__).resolve().parent / "rules.json"


@frozen
class Rule:
    """`classes`: alternatives for each place; `within`: how many words they may span; `needs`: one of these must be there.

    `words`: a pattern, which is not even compiled before one of the words of `some` is there. `without` must not be there.
    """

    id: str
    category: str
    classes: tuple[frozenset[str], ...] = ()
    within: int = 12
    order: bool = True
    needs: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()
    some: frozenset[str] = frozenset()
    words: str = ""
    starts: str = ""
    without: str = ""

    @classmethod
    def of(cls, data: dict[str, Any]) -> Rule:
        return cls(
            id=data["id"],
            category=data["category"],
            classes=tuple(frozenset(place.split("|")) for place in data.get("classes", ())),
            within=data.get("within", 12),
            order=data.get("order", True),
            needs=frozenset(data.get("needs", ())),
            unless=frozenset(data.get("unless", ())),
            some=frozenset(data.get("any", "").split()),
            words=data.get("words", ""),
            starts=data.get("starts", ""),
            without=data.get("not", ""),
        )

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str] | None, ...]:
        """What the text must have, begin with and not have; compiled when a text first comes that far."""
        return tuple(re.compile(text) if text else None for text in (self.words, self.starts, self.without))

    def fits(self, words: list[str], found: list[tuple[int, str]], present: frozenset[str]) -> bool:
        """Whether the rule holds for words and the places of their classes."""
        if self.unless & present or (self.needs and not self.needs & present):
            return False
        if not all(place & present for place in self.classes) or (self.words and self.some.isdisjoint(words)):
            return False
        if self.classes and not (self._row(found) or (not self.order and self._row(found, backwards=True))):
            return False
        wanted, begins, unwanted = self.patterns
        text = " ".join(words)
        return not ((wanted and not wanted.search(text)) or (begins and not begins.match(text))) and not (
            unwanted and unwanted.search(text)
        )

    def _row(self, found: list[tuple[int, str]], backwards: bool = False) -> bool:
        """Whether the classes come one after another, each at a later word, within the span."""
        wanted = self.classes[::-1] if backwards else self.classes
        for number, (first, name) in enumerate(found):
            if name not in wanted[0]:
                continue
            place, at = 1, first
            for position, other in found[number + 1 :]:
                if position - first > self.within or place == len(wanted):
                    break
                if position > at and other in wanted[place]:
                    place, at = place + 1, position
            if place == len(wanted):
                return True
        return False


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    return tuple(Rule.of(data) for data in json.loads(RULES.read_text(encoding="utf-8")))
