"""A JSON Schema (draft 2020-12) read into shapes. What cannot be held to exactly is refused by its keyword and place.

`unevaluatedProperties` and `unevaluatedItems` depend on which branches of a schema a value took. So a schema can be read
into branches, each with the properties and items that it speaks of; everything else is read into one branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from orchard.generate.errors import UnsupportedSchema
from orchard.generate.json_schema.algebra import Algebra
from orchard.generate.json_schema.containers import Containers
from orchard.generate.json_schema.document import Document, escaped
from orchard.generate.json_schema.keywords import (
    Formats,
    Part,
    check_draft,
    check_format,
    check_keywords,
    draft_of,
    numbers,
    plain_atoms,
    refuse,
    strings,
    table,
    texts,
    types_of,
)
from orchard.generate.json_schema.lexer import TooComplex
from orchard.generate.json_schema.shapes import ANY, KINDS, NEVER, Arrays, Objects, Shape, Unsayable

MOST_BRANCHES = 64


@dataclass(frozen=True)
class Spoken:
    """The properties and items that a branch speaks of."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_names: bool = False
    items: int = 0
    all_items: bool = False
    contained: bool = False
    """`contains` is in it, which speaks of items anywhere."""

    def __or__(self, other: Spoken) -> Spoken:
        return Spoken(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_names or other.all_names,
            max(self.items, other.items),
            self.all_items or other.all_items,
            self.contained or other.contained,
        )


@dataclass(frozen=True)
class Branch:
    shape: Shape
    spoken: Spoken = Spoken()


Ways = Callable[[Shape], list[Branch]]
"""The ways to keep to a keyword for values of a shape. They may allow other values as well."""


class Reader:
    """`read()` gives the shape of the whole schema; parts that are referred to get names in `algebra`."""

    def __init__(self, root: Any, formats: Formats = "assert") -> None:
        self.document = Document(root)
        self.algebra = Algebra()
        self.formats: Formats = formats
        self.older = draft_of(root)
        self._containers = Containers(self.algebra, self.shape)
        self._expanding: list[int] = []

    def read(self) -> Shape:
        return self.shape(self.document.root, "")

    def shape(self, part: Any, pointer: str) -> Shape:
        """What a part of the schema allows."""
        return self.algebra.join(branch.shape for branch in self.branches(part, pointer, apart=False))

    def branches(self, part: Any, pointer: str, *, apart: bool) -> list[Branch]:
        """`apart`: one for each way through the part, with what it speaks of."""
        if isinstance(part, bool):
            return [Branch(ANY if part else NEVER)]
        check_keywords(part, pointer)
        check_draft(self.document.root, self.document.pointers, part, self.older)
        apart = apart or "unevaluatedProperties" in part or "unevaluatedItems" in part
        found = [self._own(part, pointer)]
        for keyword, ways in self._steps(part, pointer, apart):
            try:
                found = [
                    Branch(self.algebra.meet(one.shape, more.shape), one.spoken | more.spoken)
                    for one in found
                    for more in ways(one.shape)
                ]
            except Unsayable as error:
                refuse(error.keyword or keyword, error.pointer or pointer, f"this cannot be held to: {error.why}")
            except TooComplex:
                refuse(keyword, pointer, "its expressions are too complex to be followed")
            found = [one for one in found if one.shape != NEVER]
            if len(found) > MOST_BRANCHES:
                refuse(keyword, pointer, f"more than {MOST_BRANCHES} ways through it")
        return [self._rest(part, pointer, one) for one in found]

    # What a part says by itself ---------------------------------------------------------------------------------------

    def _own(self, part: Part, pointer: str) -> Branch:
        types = types_of(part, pointer)
        check_format(part, pointer, types, self.formats)
        found = plain_atoms(types)
        number = numbers(part, pointer, types, self.formats)
        text_shape = strings(part, pointer, self.formats)
        array = self._containers.arrays(part, pointer)
        thing = self._containers.objects(part, pointer)
        if types & {"number", "integer"}:
            found.append(number)
        found += [one for kind, one in (("string", text_shape), ("array", array), ("object", thing)) if kind in types]
        shape = self.algebra.join(found)
        free = set(shape.atoms) == set(KINDS)
        return Branch(ANY if free else shape, self._spoken(part, pointer))

    def _spoken(self, part: Part, pointer: str) -> Spoken:
        return Spoken(
            names=frozenset(table(part, "properties", pointer)),
            patterns=frozenset(table(part, "patternProperties", pointer)),
            all_names="additionalProperties" in part,
            items=len(part.get("prefixItems", ())),
            all_items="items" in part,
            contained="contains" in part,
        )

    # What is said in place --------------------------------------------------------------------------------------------

    def _steps(self, part: Part, pointer: str, apart: bool) -> list[tuple[str, Ways]]:
        """The keywords that apply other schemas to the same value; each gives the ways that it can be kept."""
        steps: list[tuple[str, Ways]] = []
        for keyword in ("const", "enum"):
            if keyword in part:
                steps.append((keyword, lambda _, keyword=keyword: self._listed(part, pointer, keyword)))  # type: ignore[misc]
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in part:
                steps.append((keyword, lambda _, keyword=keyword: self._referred(part, keyword, apart)))  # type: ignore[misc]
        for place, one in enumerate(self._schemas(part, "allOf", pointer)):
            steps.append(("allOf", self._ways(one, f"{pointer}/allOf/{place}", apart)))
        if "anyOf" in part:
            steps.append(("anyOf", lambda _: self._any_of(part, pointer, apart)))
        if "oneOf" in part:
            steps.append(("oneOf", lambda base: self._one_of(part, pointer, apart, base)))
        if "not" in part:
            steps.append(("not", lambda base: [Branch(self._not(part["not"], f"{pointer}/not", base))]))
        if "if" in part and ("then" in part or "else" in part or apart):
            steps.append(("if", lambda base: self._if(part, pointer, apart, base)))
        return steps + self._dependent(part, pointer, apart)

    def _ways(self, part: Any, pointer: str, apart: bool) -> Ways:
        return lambda _: self.branches(part, pointer, apart=apart)

    def _schemas(self, part: Part, keyword: str, pointer: str) -> list[Any]:
        found = part.get(keyword, [])
        if not isinstance(found, list) or (keyword in part and not found):
            refuse(keyword, pointer, "not a list of schemas")
        return found

    def _listed(self, part: Part, pointer: str, keyword: str) -> list[Branch]:
        values = [part["const"]] if keyword == "const" else part["enum"]
        if not isinstance(values, list):
            refuse(keyword, pointer, "not a list of values")
        return [Branch(self.algebra.join(self._containers.literal(value, keyword, pointer) for value in values))]

    def _referred(self, part: Part, keyword: str, apart: bool) -> list[Branch]:
        found = self.document.find(part[keyword], part, keyword)
        if isinstance(found, bool):
            return [Branch(ANY if found else NEVER)]
        pointer = self.document.pointers[id(found)]
        if not apart:
            return [Branch(self.algebra.define(f"at {pointer}", lambda: self.shape(found, pointer)))]
        if id(found) in self._expanding:
            raise Unsayable("it goes round in a circle under unevaluatedProperties or unevaluatedItems")
        self._expanding.append(id(found))
        try:
            return self.branches(found, pointer, apart=True)
        finally:
            self._expanding.pop()

    def _any_of(self, part: Part, pointer: str, apart: bool) -> list[Branch]:
        options = [
            self.branches(one, f"{pointer}/anyOf/{place}", apart=apart)
            for place, one in enumerate(self._schemas(part, "anyOf", pointer))
        ]
        if not apart:
            return [Branch(self.algebra.join(branch.shape for option in options for branch in option))]
        ways: list[Branch] = []  # a value that takes several options is spoken of by all of them
        for size in range(1, len(options) + 1):
            for taken in combinations(options, size):
                found = [Branch(ANY)]
                for option in taken:
                    found = [
                        Branch(shape, one.spoken | more.spoken)
                        for one in found
                        for more in option
                        if (shape := self.algebra.meet(one.shape, more.shape)) != NEVER
                    ]
                ways += found
                if len(ways) > MOST_BRANCHES:
                    raise Unsayable(f"more than {MOST_BRANCHES} ways through it")
        return ways

    def _one_of(self, part: Part, pointer: str, apart: bool, base: Shape) -> list[Branch]:
        given = self._schemas(part, "oneOf", pointer)
        options = [self.branches(one, f"{pointer}/oneOf/{place}", apart=apart) for place, one in enumerate(given)]
        shapes = [self.algebra.join(branch.shape for branch in option) for option in options]
        ways: list[Branch] = []
        for place, option in enumerate(options):
            for branch in option:
                shape = self.algebra.meet(base, branch.shape)
                for other, against in enumerate(shapes):
                    shape = self.algebra.minus(shape, against) if other != place else shape
                ways.append(Branch(shape, branch.spoken))
        return ways if apart else [Branch(self.algebra.join(branch.shape for branch in ways))]

    def _not(self, part: Any, pointer: str, base: Shape) -> Shape:
        return self.algebra.minus(base, self.shape(part, pointer))

    def _if(self, part: Part, pointer: str, apart: bool, base: Shape) -> list[Branch]:
        tested = self.branches(part["if"], f"{pointer}/if", apart=apart)
        then = self.branches(part.get("then", True), f"{pointer}/then", apart=apart)
        otherwise = self.branches(part.get("else", True), f"{pointer}/else", apart=apart)
        failed = Branch(self._not(part["if"], f"{pointer}/if", base))
        pairs = [*((one, more) for one in tested for more in then), *((failed, more) for more in otherwise)]
        ways = [Branch(self.algebra.meet(one.shape, more.shape), one.spoken | more.spoken) for one, more in pairs]
        return ways if apart else [Branch(self.algebra.join(branch.shape for branch in ways))]

    def _dependent(self, part: Part, pointer: str, apart: bool) -> list[tuple[str, Ways]]:
        steps: list[tuple[str, Ways]] = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, demand in table(part, keyword, pointer).items():
                place = f"{pointer}/{keyword}/{escaped(name)}"
                names = keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(demand, list))
                more: Ways
                if names:
                    required = texts(keyword, place, demand)
                    more = lambda _, required=required: [Branch(self._having(required))]  # type: ignore[misc]  # noqa: E731
                else:
                    more = self._ways(demand, place, apart)
                steps.append((keyword, lambda base, name=name, more=more: self._depending(name, more(base), apart)))  # type: ignore[misc]
        return steps

    def _having(self, names: tuple[str, ...]) -> Shape:
        """Anything, but an object only with these properties."""
        thing = self.algebra.object(Objects(required=names))
        others = [Shape((atom,)) for atom in self.algebra.atoms(ANY) if not isinstance(atom, Objects)]
        return self.algebra.join([*others, *([Shape((thing,))] if thing is not None else [])])

    def _depending(self, name: str, more: list[Branch], apart: bool) -> list[Branch]:
        """Objects with the property keep to `more`; everything else is free."""
        thing = self.algebra.object(Objects(required=(name,)))
        having = Shape((thing,)) if thing is not None else NEVER
        found = [Branch(self.algebra.meet(having, one.shape), one.spoken) for one in more]
        found.append(Branch(self.algebra.complement(having)))
        return found if apart else [Branch(self.algebra.join(branch.shape for branch in found))]

    # What was not spoken of -------------------------------------------------------------------------------------------

    def _rest(self, part: Part, pointer: str, branch: Branch) -> Branch:
        shape, spoken = branch.shape, branch.spoken
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword not in part:
                continue
            rest = self.shape(part[keyword], f"{pointer}/{keyword}")
            limit: Shape = ANY
            if keyword == "unevaluatedProperties":
                if not spoken.all_names:
                    limit = self._containers.except_for(spoken.names, spoken.patterns, rest, pointer)
                spoken |= Spoken(all_names=True)
            else:
                if spoken.contained:
                    refuse(keyword, pointer, "beside `contains`, which speaks of items anywhere")
                if not spoken.all_items:
                    limit = self._only_arrays(Arrays(prefix=(ANY,) * spoken.items, rest=rest))
                spoken |= Spoken(all_items=True)
            try:
                shape = self.algebra.meet(shape, limit)
            except Unsayable as error:
                raise UnsupportedSchema(keyword, pointer, f"this cannot be held to: {error.why}") from None
        return Branch(shape, spoken)

    def _only_arrays(self, wanted: Arrays) -> Shape:
        others = [Shape((atom,)) for atom in self.algebra.atoms(ANY) if not isinstance(atom, Arrays)]
        array = self.algebra.array(wanted)
        return self.algebra.join([*others, *([Shape((array,))] if array is not None else [])])
