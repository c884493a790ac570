"""What a JSON Schema allows, as plain values: a shape is a choice of atoms, and an atom says all there is to say of one kind
of value. A schema is read into shapes (`json_schema.reader`), shapes are cut and turned around (`json_schema.algebra`) and
written as a grammar (`json_schema.writer`).

Atoms are immutable and equal where they say the same, so that a shape can be the name of its rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from orchard.generate.json_schema.numbers import Numbers
from orchard.generate.json_schema.strings import ALL_STRINGS, Strings


class Unsayable(ValueError):
    """Something that no grammar here says: `keyword` and `pointer` where they are known, and why."""

    def __init__(self, why: str, keyword: str = "", pointer: str = "") -> None:
        super().__init__(why)
        self.why, self.keyword, self.pointer = why, keyword, pointer


@dataclass(frozen=True)
class Shape:
    """Any value that one of the atoms allows; without atoms none."""

    atoms: tuple[Atom, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash(self.atoms)

    def __hash__(self) -> int:  # shapes hold shapes: each is hashed once
        return self._hash


@dataclass(frozen=True)
class Anything:
    """Any value."""


@dataclass(frozen=True)
class Ref:
    """The shape of this name, worked out when it is needed: schemas may go round in circles."""

    name: str


@dataclass(frozen=True)
class Nulls:
    """null."""


@dataclass(frozen=True)
class Booleans:
    values: frozenset[bool] = frozenset({True, False})


NEVER = Shape()
ANY = Shape((Anything(),))


@dataclass(frozen=True)
class Contains:
    """From `low` to `high` items are of this shape. `pointer`: where the schema says so."""

    shape: Shape
    low: int = 1
    high: int | None = None
    pointer: str = ""


@dataclass(frozen=True)
class Arrays:
    """The first items are of the shapes in `prefix`, all others of `rest`. `unique`: where the schema says that no two items
    are equal, "" where it does not."""

    prefix: tuple[Shape, ...] = ()
    rest: Shape = ANY
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: str = ""

    def at(self, place: int) -> Shape:
        return self.prefix[place] if place < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Keys:
    """Properties whose names are among these, and the shape of their values."""

    names: Strings = ALL_STRINGS
    shape: Shape = ANY


@dataclass(frozen=True)
class Objects:
    """`properties` are those with a shape of their own, in the order in which they are written. Any other property must be of
    one of the `others`, which no name is in twice; of none: not allowed. `pointer`: where the numbers of properties are from."""

    properties: tuple[tuple[str, Shape], ...] = ()
    others: tuple[Keys, ...] = (Keys(),)
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    pointer: str = ""

    @cached_property
    def listed(self) -> dict[str, Shape]:
        return dict(self.properties)

    def at(self, name: str) -> Shape | None:
        """The shape of a property; None where it is not listed and no other may have this name."""
        if name in self.listed:
            return self.listed[name]
        return next((keys.shape for keys in self.others if keys.names.holds(name)), None)


Atom = Anything | Ref | Nulls | Booleans | Numbers | Strings | Arrays | Objects
KINDS: tuple[Atom, ...] = (Nulls(), Booleans(), Numbers(), ALL_STRINGS, Arrays(), Objects())
"""The six kinds of JSON values, each without limits."""
