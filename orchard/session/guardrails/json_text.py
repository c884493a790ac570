"""The texts inside JSON, character by character as it is written, each with its place in the JSON.

A guard must see what a reader of the parsed object sees: `\\u0062omb` is `bomb`, and brackets are no text. Words outside
of all texts are given too: JSON has none but `true`, `false` and `null`, and what is no JSON must not go unseen.
"""

from __future__ import annotations

from collections.abc import Iterator

_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": " ", "f": " "}
BREAK = ""
"""Between two texts."""


class JsonStrings:
    """`push` JSON in any pieces; it gives (character, where it begins in all that was pushed), and `BREAK` between texts."""

    def __init__(self) -> None:
        self.place = 0
        """Characters of JSON so far."""
        self.held: int | None = None
        """Where an escape began that is not complete yet."""
        self._inside = False
        self._escape = ""
        self._half = ""

    def push(self, json: str) -> Iterator[tuple[str, int]]:
        for character in json:
            at, self.place = self.place, self.place + 1
            if not self._inside:
                self._inside = character == '"'
                yield (BREAK if self._inside or character in ",:{}[]" else character), at
            elif self._escape:
                yield from self._escaped(character)
            elif character == "\\":
                self._escape, self.held = character, at if self.held is None else self.held
            elif character == '"':
                self._inside, self._half, self.held = False, "", None
                yield BREAK, at
            else:
                self._half, self.held = "", None
                yield character, at

    def _escaped(self, character: str) -> Iterator[tuple[str, int]]:
        """One more character of an escape. Two halves of a surrogate pair give one character."""
        self._escape += character
        at = self.held if self.held is not None else self.place - 1
        if self._escape[1] != "u":
            self._escape, self.held, self._half = "", None, ""
            yield _PLAIN.get(character, character), at
        elif len(self._escape) == 6:
            digits, self._escape = self._escape[2:], ""
            try:
                code = int(digits, 16)
            except ValueError:
                code = 0xFFFD
            if 0xD800 <= code < 0xDC00:
                self._half = chr(code)  # the rest comes next: still held
                return
            pair = self._half + chr(code)
            self._half, self.held = "", None
            yield pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), at
