"""Objects written as rules: listed properties in their order, those that need not be there left out or not, then all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchard.generate.json_schema.lexer import is_empty
from orchard.generate.json_schema.rules import IMPOSSIBLE, NOTHING, Body, Choice, Lexeme, Text, Times, maybe, row
from orchard.generate.json_schema.shapes import NEVER, Objects, Unsayable
from orchard.generate.json_schema.strings import quote

if TYPE_CHECKING:
    from orchard.generate.json_schema.writer import Writer

MOST_STATES = 5000
"""Of one object whose properties are counted."""
COMMA, COLON, OPEN, CLOSE = Text(","), Text(":"), Text("{"), Text("}")


class ObjectRules:
    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def body(self, atom: Objects) -> Body:
        entries = [
            (row(Text(quote(name)), COLON, self.writer.value(shape)), name in atom.required)
            for name, shape in atom.properties
            if shape != NEVER
        ]
        other = self._other(atom)
        low, high = atom.low, atom.high
        if high is not None and other == IMPOSSIBLE and high >= len(entries):
            high = None
        if not low and high is None:
            return row(OPEN, self._first(atom, entries, other), CLOSE)
        if len(entries) * max(low, high or 0) > MOST_STATES:
            raise Unsayable("its numbers are too large", "maxProperties", _place(atom))
        return row(OPEN, self._counted(atom, entries, other, 0, 0), CLOSE)

    def _other(self, atom: Objects) -> Body:
        """Any property that is not listed."""
        found: list[Body] = []
        listed = tuple(atom.listed)
        for keys in atom.others:
            definition = keys.names.without(listed).expression()
            if not is_empty(definition):
                found.append(row(Lexeme(definition), COLON, self.writer.value(keys.shape)))
        return Choice(tuple(found))

    def _first(self, atom: Objects, entries: list[tuple[Body, bool]], other: Body) -> Body:
        """The properties of an object before which none is written yet."""
        options: list[Body] = []
        for place, (entry, needed) in enumerate(entries):
            options.append(row(entry, self._more(atom, entries, other, place + 1)))
            if needed:
                return Choice(tuple(options))
        return Choice((*options, row(other, Times(row(COMMA, other), 0, None)), NOTHING))

    def _more(self, atom: Objects, entries: list[tuple[Body, bool]], other: Body, place: int) -> Body:
        """The properties from `place` on, each after a comma. A rule of its own, so that all that come here share it."""
        parts: list[Body] = []
        while place < len(entries) and entries[place][1]:
            parts += [COMMA, entries[place][0]]
            place += 1
        if place == len(entries):
            return row(*parts, Times(row(COMMA, other), 0, None))
        rest = self.writer.rule(
            ("more", atom, place),
            lambda: row(maybe(row(COMMA, entries[place][0])), self._more(atom, entries, other, place + 1)),
        )
        return row(*parts, rest)

    def _counted(self, atom: Objects, entries: list[tuple[Body, bool]], other: Body, place: int, written: int) -> Body:
        """The properties from `place` on, where `written` are there already."""
        key = ("counted", atom, place, min(written, max(atom.low, atom.high or 0) + 1))
        return self.writer.rule(key, lambda: self._counted_body(atom, entries, other, place, written))

    def _counted_body(
        self, atom: Objects, entries: list[tuple[Body, bool]], other: Body, place: int, written: int
    ) -> Body:
        if atom.high is not None and written > atom.high:
            return IMPOSSIBLE
        comma = [COMMA] if written else []
        if place < len(entries):
            entry, needed = entries[place]
            there = row(*comma, entry, self._counted(atom, entries, other, place + 1, written + 1))
            return there if needed else Choice((there, self._counted(atom, entries, other, place + 1, written)))
        low, high = max(atom.low - written, 0), None if atom.high is None else atom.high - written
        if other == IMPOSSIBLE or high == 0:
            return NOTHING if low == 0 else IMPOSSIBLE
        if low > 1:
            why = "properties that are not named could be written twice, and count once"
            raise Unsayable(why, "minProperties", _place(atom))
        some = row(*comma, other, Times(row(COMMA, other), 0, None if high is None else high - 1))
        return some if low else maybe(some)


def _place(atom: Objects) -> str:
    return "" if atom.pointer == "/" else atom.pointer
