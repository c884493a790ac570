"""Shapes written as a grammar: JSON without spaces, properties in the order of the schema and before all others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from fractions import Fraction
from itertools import product
from typing import Any

from orchard.generate.json_schema import numbers
from orchard.generate.json_schema.algebra import Algebra
from orchard.generate.json_schema.lexer import is_empty
from orchard.generate.json_schema.numbers import Numbers, decimal
from orchard.generate.json_schema.objects import ObjectRules
from orchard.generate.json_schema.rules import (
    IMPOSSIBLE,
    NOTHING,
    Body,
    Choice,
    Lexeme,
    Printer,
    Raw,
    Rule,
    Text,
    Times,
    bounded,
    maybe,
    row,
    without_traps,
)
from orchard.generate.json_schema.shapes import (
    ANY,
    KINDS,
    NEVER,
    Anything,
    Arrays,
    Atom,
    Booleans,
    Nulls,
    Ref,
    Shape,
    Unsayable,
)
from orchard.generate.json_schema.strings import Strings, lark_string, quote

MOST_RULES = 20_000
MOST_UNIQUE = 64
"""Different values that items without equals are chosen from: as many as a rule can remember."""
MOST_STATES = 2000
"""Of one list with `contains`."""
NEXT = "\n  | "
COMMA, OPEN, CLOSE = Text(","), Text("["), Text("]")


class Writer:
    """Makes the rules of a shape and of everything inside it."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.rules: dict[Hashable, Body] = {}
        self._waiting: list[tuple[Hashable, Any]] = []
        self._objects = ObjectRules(self)
        self._lists = 0

    def write(self, shape: Shape, depth: int) -> str:
        """The text of the grammar; empty where no value is of the shape. `depth`: see `rules.bounded`."""
        self.value(shape)
        while self._waiting:
            key, make = self._waiting.pop()
            self.rules[key] = make()
            if len(self.rules) > MOST_RULES:
                raise Unsayable("its grammar has too many rules", "schema")
        kept = without_traps(self.rules, shape)
        if shape not in kept:
            return ""
        deep = bounded(kept, shape, depth)
        if len(deep) > MOST_RULES:
            raise Unsayable("its grammar has too many rules", "schema")
        return Printer(deep).text((shape, depth)) if deep else ""

    def rule(self, key: Hashable, make: Any) -> Body:
        """The rule of this key, which `make` gives the body of when its turn comes."""
        if key not in self.rules:
            self.rules[key] = IMPOSSIBLE
            self._waiting.append((key, make))
        return Rule(key)

    def value(self, shape: Shape) -> Body:
        """A value of a shape."""
        return self.rule(shape, lambda: self._alternatives(shape))

    def _alternatives(self, shape: Shape) -> Body:
        if shape == ANY:
            return Choice(tuple(self._atom(atom) for atom in KINDS))
        return Choice(tuple(self._atom(atom) for atom in shape.atoms))

    def _atom(self, atom: Atom) -> Body:
        if isinstance(atom, Ref):
            return self.value(self.algebra.shape(atom.name))
        if isinstance(atom, Anything):
            return self.value(ANY)
        if isinstance(atom, Nulls):
            return Text("null")
        if isinstance(atom, Booleans):
            return Choice(tuple(Text("true" if value else "false") for value in sorted(atom.values, reverse=True)))
        if isinstance(atom, Numbers):
            return self._number(atom)
        if isinstance(atom, Strings):
            return Lexeme(atom.expression())
        return self._array(atom) if isinstance(atom, Arrays) else self._objects.body(atom)

    def _number(self, atom: Numbers) -> Body:
        try:
            body = atom.rule()
            if body:
                return Raw(body)
            definition = atom.expression()
            # Bounds so close, or so large, that no number of the digits that are allowed is between them.
            return IMPOSSIBLE if " & " in definition and is_empty(definition) else Lexeme(definition)
        except numbers.Unsayable as error:
            raise Unsayable(str(error), "multipleOf" if atom.step is not None else "number") from None

    # Arrays -----------------------------------------------------------------------------------------------------------

    def _array(self, atom: Arrays) -> Body:
        if atom.unique:
            return self._unique(atom)
        if atom.contains:
            return row(OPEN, self._counted(atom, 0, (0,) * len(atom.contains)), CLOSE)
        length = len(atom.prefix)
        high = None if atom.high is None else atom.high - length
        tail: Body
        if not length:
            more = Times(row(COMMA, self.value(atom.rest)), max(atom.low - 1, 0), None if high is None else high - 1)
            some = row(self.value(atom.rest), more)
            tail = NOTHING if high == 0 else some if atom.low else maybe(some)
            return row(OPEN, tail, CLOSE)
        tail = Times(row(COMMA, self.value(atom.rest)), max(atom.low - length, 0), high) if high != 0 else NOTHING
        for place in reversed(range(length)):
            tail = row(*([COMMA] if place else []), self.value(atom.prefix[place]), tail)
            tail = tail if place < atom.low else maybe(tail)
        return row(OPEN, tail, CLOSE)

    def _counted(self, atom: Arrays, place: int, counts: tuple[int, ...]) -> Body:
        """The rest of a list with `contains`, after `place` items of which so many were of each kind."""
        last = max(len(atom.prefix), atom.low, 0 if atom.high is None else atom.high)
        states = (last + 1) * (max((max(one.low, one.high or 0) for one in atom.contains), default=0) + 2)
        if states > MOST_STATES:
            raise Unsayable("its numbers are too large", "contains", atom.contains[0].pointer)
        key = ("counted", atom, min(place, last + 1), place == 0, counts)
        return self.rule(key, lambda: self._counted_body(atom, place, counts, last))

    def _counted_body(self, atom: Arrays, place: int, counts: tuple[int, ...], last: int) -> Body:
        options: list[Body] = []
        if place >= atom.low and all(count >= one.low for count, one in zip(counts, atom.contains, strict=True)):
            options.append(NOTHING)
        if atom.high is not None and place >= atom.high:
            return Choice(tuple(options))
        for matched in product((True, False), repeat=len(counts)):
            item, after = atom.at(place), []
            for yes, count, one in zip(matched, counts, atom.contains, strict=True):
                if yes:
                    item = self.algebra.meet(item, one.shape)
                elif one.high is not None:  # only then it matters that an item is not of the kind
                    item = self._other(item, one.shape, one.pointer)
                most = one.low if one.high is None else one.high + 1
                after.append(min(count + yes, most))
            over = any(one.high is not None and n > one.high for n, one in zip(after, atom.contains, strict=True))
            if item != NEVER and not over:
                comma = [COMMA] if place else []
                then = self._counted(atom, min(place + 1, last + 1), tuple(after))
                options.append(row(*comma, self.value(item), then))
        return Choice(tuple(options))

    def _other(self, item: Shape, kind: Shape, pointer: str) -> Shape:
        try:
            return self.algebra.meet(item, self.algebra.complement(kind))
        except Unsayable as error:
            raise Unsayable(error.why, "contains", pointer) from None

    def _unique(self, atom: Arrays) -> Body:
        """Lists without equal items, of values that can be counted: a bit for each that was used."""
        place = "" if atom.unique == "/" else atom.unique
        if atom.prefix or atom.contains:
            raise Unsayable("items that are not all of the same kind cannot be kept apart", "uniqueItems", place)
        values = list(dict.fromkeys(self._values(atom.rest, place)))
        if len(values) > MOST_UNIQUE:
            why = f"items that are not one of at most {MOST_UNIQUE} values cannot be kept apart"
            raise Unsayable(why, "uniqueItems", place)
        high = len(values) if atom.high is None else min(atom.high, len(values))
        if atom.low > high:
            return IMPOSSIBLE
        if not high:
            return Text("[]")
        self._lists += 1
        return row(OPEN, _unequal(f"u{self._lists}", values, atom.low, high), CLOSE)

    def _values(self, shape: Shape, pointer: str) -> Iterator[str]:
        """The JSON of every value of a shape. Raises `Unsayable` where it is of a kind without an end."""
        for atom in self.algebra.atoms(shape):
            if isinstance(atom, Nulls):
                yield "null"
            elif isinstance(atom, Booleans):
                yield from (("true" if value else "false") for value in sorted(atom.values))
            elif isinstance(atom, Strings) and atom.values is not None:
                yield from map(quote, atom.values)
            elif isinstance(atom, Numbers) and _few(atom):
                step = atom.step or Fraction(1)
                yield from map(decimal, Numbers("whole", atom.low, atom.high, step=step).multiples() or ())
            else:
                raise Unsayable("items of kinds without an end cannot be kept apart", "uniqueItems", pointer)


def _few(atom: Numbers) -> bool:
    return atom.kind == "whole" and atom.low is not None and atom.high is not None and atom.high - atom.low < 1000


def _unequal(name: str, values: list[str], low: int, high: int) -> Body:
    """Rules whose parameter has a bit for each value that was used."""
    items = [f"{lark_string(value)} {name}n::set_bit({bit}) %if bit_clear({bit})" for bit, value in enumerate(values)]
    after = [f'"" %if bit_count_ge(_, {max(low, 1)})', f'"," {name}::_ %if bit_count_lt(_, {high})']
    rules = f"{name}::_: {f'{NEXT}'.join(items)}\n{name}n::_: {f'{NEXT}'.join(after)}"
    body = Raw(f"{name}::0", rules)
    return body if low else maybe(body)
