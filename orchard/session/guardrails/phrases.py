"""Finding many phrases in a list of words, in one pass: whole words only, so `ass` is not found in `class`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class Phrases:
    """Phrases with a label each, by their first word."""

    def __init__(self, phrases: Iterable[tuple[tuple[str, ...], str]]) -> None:
        self._first: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for words, label in phrases:
            if words:
                self._first.setdefault(words[0], []).append((words, label))
        for found in self._first.values():
            if len(found) > 1:
                found.sort(key=lambda entry: -len(entry[0]))

    def __bool__(self) -> bool:
        return bool(self._first)

    def find(self, words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        """Start, end and label of every phrase, longer ones first where several begin at one word."""
        for start, word in enumerate(words):
            for phrase, label in self._first.get(word, ()):
                end = start + len(phrase)
                if len(phrase) == 1 or tuple(words[start:end]) == phrase:
                    yield start, end, label
