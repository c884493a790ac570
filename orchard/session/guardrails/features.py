"""What a classifier sees of a text: known words, their neighbours, classes of words and pairs of classes, each as a number.

Words that the lexicon does not know say nothing by themselves: otherwise every word that the training sentences happen to
have in one category only would count. The numbers are hashes into one table, so nothing has to be stored but weights, and
a text costs a few dozen look-ups. The same function serves training and use.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterator

from orchard.session.guardrails.lexicon import Lexicon, stem

BUCKETS = 1 << 14
NEAR = 12
"""How many words two classes may be apart to count as a pair."""
INTENT = frozenset(
    {"ask", "wish", "write", "commit", "define", "find", "protect", "learn", "fiction", "evade", "justify"}
)
"""Classes that say what a text wants to do with what it is about."""
TARGET = frozenset({"person", "group", "body", "system", "place", "make", "childword", "falsehood", "death", "nature"})
"""Classes that say to whom or to what. Which of these are missing says as much as which are there."""
SHAPE = INTENT | TARGET
WEAK = SHAPE - {"evade"} | {"machine", "idiom", "illness", "graphic", "common"}
"""Classes that are never harmful among themselves."""


def features(words: list[str], lexicon: Lexicon) -> list[int]:
    """The numbers of everything in a text, each once, in order; none where nothing in it could be harmful."""
    return sorted({crc32(name.encode()) % BUCKETS for name in names(words, lexicon)})


def names(words: list[str], lexicon: Lexicon) -> Iterator[str]:
    stems = [stem(word) for word in words]
    found = lexicon.classes(stems)
    present = {name for _, name in found}
    strong = present - WEAK
    if not strong:
        return
    places = {start for start, name in found if name not in WEAK}
    for place in places:
        yield stems[place]
        if place:
            yield f"{stems[place - 1]} {stems[place]}"
        if place + 1 < len(stems):
            yield f"{stems[place]} {stems[place + 1]}"
    for number, (start, name) in enumerate(found):
        yield f"<{name}>"
        for other, second in found[number + 1 :]:
            if other - start > NEAR:
                break
            if second != name:
                yield f"<{name}> <{second}>"
    for shape in SHAPE & present:
        for name in strong:
            yield f"{shape}+{name}"
    for shape in SHAPE - present:
        for name in strong:
            yield f"no {shape}+{name}"
