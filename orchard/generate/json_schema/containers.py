"""The keywords of JSON Schema for arrays and objects, and values that are given literally, read into shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import product
from typing import Any

from orchard.generate.json_schema.algebra import Algebra
from orchard.generate.json_schema.document import escaped
from orchard.generate.json_schema.keywords import Part, count, exact, pattern_expression, refuse, table, text, texts
from orchard.generate.json_schema.lexer import TooComplex
from orchard.generate.json_schema.numbers import Numbers
from orchard.generate.json_schema.shapes import (
    ANY,
    NEVER,
    Arrays,
    Booleans,
    Contains,
    Keys,
    Nulls,
    Objects,
    Shape,
    Unsayable,
)
from orchard.generate.json_schema.strings import Strings

MOST_PATTERNS = 5
"""Of one object: names are sorted by which of them they match."""
MOST_KEYS = 1000
"""Of one object, or texts that its names are one of."""


class Containers:
    """`shape(part, pointer)` reads a schema inside another."""

    def __init__(self, algebra: Algebra, shape: Callable[[Any, str], Shape]) -> None:
        self.algebra = algebra
        self.shape = shape

    # Arrays -----------------------------------------------------------------------------------------------------------

    def arrays(self, part: Part, pointer: str) -> Shape:
        prefix = part.get("prefixItems", [])
        if not isinstance(prefix, list) or ("prefixItems" in part and not prefix):
            refuse("prefixItems", pointer, "not a list of schemas")
        if isinstance(part.get("items"), list):
            refuse("items", pointer, "a list of schemas, which older drafts knew", "call it prefixItems")
        unique = part.get("uniqueItems", False)
        if not isinstance(unique, bool):
            refuse("uniqueItems", pointer, "neither true nor false")
        found = self.algebra.array(
            Arrays(
                prefix=tuple(self.shape(one, f"{pointer}/prefixItems/{place}") for place, one in enumerate(prefix)),
                rest=self.shape(part["items"], f"{pointer}/items") if "items" in part else ANY,
                low=count(part, "minItems", pointer) or 0,
                high=count(part, "maxItems", pointer),
                contains=self._contains(part, pointer),
                unique=(pointer or "/") if unique else "",
            )
        )
        return Shape((found,)) if found is not None else NEVER

    def _contains(self, part: Part, pointer: str) -> tuple[Contains, ...]:
        low, high = count(part, "minContains", pointer), count(part, "maxContains", pointer)
        if "contains" not in part:
            return ()  # by itself neither limit says anything
        shape = self.shape(part["contains"], f"{pointer}/contains")
        return (Contains(shape, 1 if low is None else low, high, pointer),)

    # Objects ----------------------------------------------------------------------------------------------------------

    def objects(self, part: Part, pointer: str) -> Shape:
        given = table(part, "properties", pointer)
        patterns = {
            pattern_expression("patternProperties", f"{pointer}/patternProperties", pattern): self.shape(
                one, f"{pointer}/patternProperties/{escaped(pattern)}"
            )
            for pattern, one in table(part, "patternProperties", pointer).items()
        }
        rest = self.shape(part.get("additionalProperties", True), f"{pointer}/additionalProperties")
        required = texts("required", pointer, part.get("required", []))
        if len(given) + len(required) > MOST_KEYS:
            refuse("properties", pointer, f"more than {MOST_KEYS:,} properties")
        own = {name: self.shape(one, f"{pointer}/properties/{escaped(name)}") for name, one in given.items()}
        try:
            base = Objects(others=self._others(patterns, rest, pointer))
            listed = {name: self._with_patterns(name, shape, patterns) for name, shape in own.items()}
            found = self.algebra.object(
                Objects(
                    properties=tuple((name, listed[name]) for name in self._ordered(part, pointer, listed)),
                    others=base.others,
                    required=required,
                    low=count(part, "minProperties", pointer) or 0,
                    high=count(part, "maxProperties", pointer),
                    pointer=(pointer or "/") if {"minProperties", "maxProperties"} & part.keys() else "",
                )
            )
            if found is not None and "propertyNames" in part:
                found = self._named(found, part["propertyNames"], pointer)
        except TooComplex:
            refuse("patternProperties", pointer, "its patterns are too complex to be followed")
        except Unsayable as error:
            refuse(error.keyword or "properties", error.pointer or pointer, f"this cannot be held to: {error.why}")
        return Shape((found,)) if found is not None else NEVER

    def _ordered(self, part: Part, pointer: str, listed: dict[str, Shape]) -> Iterable[str]:
        """Properties in the order of `x-order`, where it is there; the others follow."""
        order = texts("x-order", pointer, part.get("x-order", []))
        return dict.fromkeys((*(name for name in order if name in listed), *listed))

    def _with_patterns(self, name: str, shape: Shape, patterns: dict[str, Shape]) -> Shape:
        for pattern, more in patterns.items():
            if Strings(has=(pattern,)).holds(name):
                shape = self.algebra.inside(shape, more)
        return shape

    def _others(self, patterns: dict[str, Shape], rest: Shape, pointer: str) -> tuple[Keys, ...]:
        """All other names, sorted by which patterns they match."""
        if len(patterns) > MOST_PATTERNS:
            refuse("patternProperties", pointer, f"more than {MOST_PATTERNS} patterns in one object")
        found = []
        for matched in product((True, False), repeat=len(patterns)):
            has = tuple(pattern for pattern, yes in zip(patterns, matched, strict=True) if yes)
            lacks = tuple(pattern for pattern, yes in zip(patterns, matched, strict=True) if not yes)
            shape = ANY if has else rest
            for pattern in has:
                shape = self.algebra.inside(shape, patterns[pattern])
            names = Strings(has=has, lacks=lacks)
            if shape != NEVER and not names.never():
                found.append(Keys(names, shape))
        return tuple(found)

    def _named(self, thing: Objects, names: Any, pointer: str) -> Objects | None:
        """The same with names of a shape."""
        shape = self.shape(names, f"{pointer}/propertyNames")
        allowed = [atom for atom in self.algebra.atoms(shape) if isinstance(atom, Strings)]
        listed = {name: one if any(a.holds(name) for a in allowed) else NEVER for name, one in thing.properties}
        others = []
        for atom in allowed:
            if atom.values is None:
                pairs = ((keys, keys.names.meet(atom)) for keys in thing.others)
                others += [Keys(both, keys.shape) for keys, both in pairs if both is not None]
                continue
            if len(atom.values) > MOST_KEYS:
                refuse("propertyNames", pointer, f"more than {MOST_KEYS:,} names")
            for name in atom.values:
                found = thing.at(name)
                listed.setdefault(name, NEVER if found is None else found)
        return self.algebra.object(
            Objects(tuple(listed.items()), tuple(others), thing.required, thing.low, thing.high, thing.pointer)
        )

    def except_for(self, names: frozenset[str], patterns: frozenset[str], rest: Shape, pointer: str) -> Shape:
        """Anything, but an object whose other properties are of a shape."""
        known = {pattern_expression("patternProperties", pointer, pattern): ANY for pattern in sorted(patterns)}
        thing = self.algebra.object(
            Objects(tuple((name, ANY) for name in sorted(names)), self._others(known, rest, pointer))
        )
        others = [Shape((atom,)) for atom in self.algebra.atoms(ANY) if not isinstance(atom, Objects)]
        return self.algebra.join([*others, *([Shape((thing,))] if thing is not None else [])])

    # Values -----------------------------------------------------------------------------------------------------------

    def literal(self, value: Any, keyword: str, pointer: str) -> Shape:
        """The shape of one value."""
        if value is None:
            return Shape((Nulls(),))
        if isinstance(value, bool):
            return Shape((Booleans(frozenset({value})),))
        if isinstance(value, int | float | Decimal):
            number = exact(keyword, pointer, value)
            return Shape((Numbers("whole" if number.denominator == 1 else "any", number, number),))
        if isinstance(value, str):
            return Shape((Strings((text(keyword, pointer, value),)),))
        if isinstance(value, list):
            items = tuple(self.literal(one, keyword, pointer) for one in value)
            return Shape((Arrays(items, NEVER, len(items), len(items)),))
        listed = tuple(
            (text(keyword, pointer, name), self.literal(one, keyword, pointer)) for name, one in value.items()
        )
        return Shape((Objects(listed, (), tuple(value)),))
