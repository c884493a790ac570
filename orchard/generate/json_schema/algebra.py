"""Cutting, joining and turning around shapes: what `allOf`, `anyOf`, `oneOf`, `not` and `if` come down to.

A shape may be defined by itself (a tree has trees). So shapes have names, and what is cut inside an object or a list is given
a name of its own and worked out later; the same cut gets the same name, and so comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from orchard.generate.json_schema import numbers
from orchard.generate.json_schema.numbers import Numbers
from orchard.generate.json_schema.shapes import (
    ANY,
    KINDS,
    NEVER,
    Anything,
    Arrays,
    Atom,
    Booleans,
    Contains,
    Keys,
    Nulls,
    Objects,
    Ref,
    Shape,
    Unsayable,
)
from orchard.generate.json_schema.strings import Strings

MOST_ALTERNATIVES = 400
"""Atoms of one shape."""
MOST_NAMES = 5000
"""Shapes worked out for one schema."""


class Algebra:
    """Holds the shapes that have names, for one schema."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], Shape]] = {}
        self._made: dict[str, Shape] = {}
        self._making: set[str] = set()
        self._cuts: dict[Any, Ref] = {}

    # Names --------------------------------------------------------------------------------------------------------

    def define(self, name: str, maker: Callable[[], Shape]) -> Shape:
        """A shape to be worked out when it is needed."""
        if name not in self._makers:
            if len(self._makers) >= MOST_NAMES:
                raise Unsayable("the schema comes down to too many different parts")
            self._makers[name] = maker
        return Shape((Ref(name),))

    def shape(self, name: str) -> Shape:
        """The shape of a name; it may be a choice of other names."""
        if name not in self._made:
            if name in self._making:
                raise Unsayable("it is defined by itself without anything in between")
            self._making.add(name)
            try:
                self._made[name] = self._makers[name]()
            finally:
                self._making.discard(name)
        return self._made[name]

    def atoms(self, shape: Shape, seen: frozenset[str] = frozenset()) -> list[Atom]:
        """The atoms of a shape: no names, and the six kinds for anything."""
        out: list[Atom] = []
        for atom in shape.atoms:
            if isinstance(atom, Ref):
                if atom.name in seen:
                    continue  # a choice of itself adds nothing
                out += self.atoms(self.shape(atom.name), seen | {atom.name})
            elif isinstance(atom, Anything):
                out += KINDS
            else:
                out.append(atom)
        return out

    def later(self, how: Callable[..., Shape], *shapes: Shape) -> Shape:
        """`how(*shapes)`, under a name where it could go round in circles."""
        if not any(isinstance(atom, Ref) for shape in shapes for atom in shape.atoms):
            return how(*shapes)
        key = (how.__name__, shapes)
        if key not in self._cuts:
            name = f"cut {len(self._cuts)}"
            self._cuts[key] = Ref(name)
            self.define(name, lambda: how(*shapes))
        return Shape((self._cuts[key],))

    # Joining and cutting --------------------------------------------------------------------------------------------

    def join(self, shapes: Iterable[Shape]) -> Shape:
        found: dict[Atom, None] = {}
        texts: dict[str, None] = {}
        for atom in (atom for shape in shapes for atom in shape.atoms):
            if isinstance(atom, Anything):
                return ANY
            if isinstance(atom, Strings) and atom.values is not None:
                texts |= dict.fromkeys(atom.values)
                found.setdefault(Strings(()))  # keeps the place of the first
            else:
                found[atom] = None
        atoms = tuple(Strings(tuple(texts)) if atom == Strings(()) else atom for atom in found)
        if len(atoms) > MOST_ALTERNATIVES:
            raise Unsayable(f"more than {MOST_ALTERNATIVES} alternatives")
        return Shape(atoms)

    def meet(self, left: Shape, right: Shape) -> Shape:
        """What both allow."""
        if left in (ANY, right):
            return right
        if right == ANY:
            return left
        pairs = ((one, other) for one in self.atoms(left) for other in self.atoms(right))
        return self.join(Shape((both,)) for one, other in pairs if (both := self._both(one, other)) is not None)

    def inside(self, left: Shape, right: Shape) -> Shape:
        """What both allow, of values inside others."""
        if left in (ANY, right):
            return right
        return left if right == ANY else self.later(self.meet, left, right)

    def _both(self, one: Atom, other: Atom) -> Atom | None:
        if type(one) is not type(other):
            return None
        if isinstance(one, Booleans) and isinstance(other, Booleans):
            values = one.values & other.values
            return Booleans(values) if values else None
        if isinstance(one, Numbers) and isinstance(other, Numbers):
            return one.meet(other)
        if isinstance(one, Strings) and isinstance(other, Strings):
            return one.meet(other)
        if isinstance(one, Arrays) and isinstance(other, Arrays):
            return self._arrays(one, other)
        if isinstance(one, Objects) and isinstance(other, Objects):
            return self._objects(one, other)
        return one

    def _arrays(self, one: Arrays, other: Arrays) -> Arrays | None:
        length = max(len(one.prefix), len(other.prefix))
        return self.array(
            Arrays(
                prefix=tuple(self.inside(one.at(place), other.at(place)) for place in range(length)),
                rest=self.inside(one.rest, other.rest),
                low=max(one.low, other.low),
                high=min((high for high in (one.high, other.high) if high is not None), default=None),
                contains=tuple(dict.fromkeys((*one.contains, *other.contains))),
                unique=one.unique or other.unique,
            )
        )

    def _objects(self, one: Objects, other: Objects) -> Objects | None:
        names = dict.fromkeys((*one.listed, *other.listed))
        listed = []
        for name in names:
            left, right = one.at(name), other.at(name)
            listed.append((name, NEVER if left is None or right is None else self.inside(left, right)))
        pairs = ((left, right) for left in one.others for right in other.others)
        others = tuple(
            Keys(both, self.inside(left.shape, right.shape))
            for left, right in pairs
            if (both := left.names.meet(right.names)) is not None
        )
        return self.object(
            Objects(
                properties=tuple(listed),
                others=others,
                required=tuple(dict.fromkeys((*one.required, *other.required))),
                low=max(one.low, other.low),
                high=min((high for high in (one.high, other.high) if high is not None), default=None),
                pointer=one.pointer or other.pointer,
            )
        )

    # Atoms that hold shapes, brought to one form; None where they allow nothing ---------------------------------------

    def array(self, given: Arrays) -> Arrays | None:
        high = given.high
        for place, shape in enumerate(given.prefix):
            if shape == NEVER:
                high = place if high is None else min(high, place)
        if given.rest == NEVER:
            high = len(given.prefix) if high is None else min(high, len(given.prefix))
        if high is not None and high < given.low:
            return None
        prefix, rest = given.prefix, given.rest
        if high is not None and high <= len(prefix):
            prefix, rest = prefix[:high], NEVER
        contains = tuple(one for one in given.contains if one.low or one.high is not None)
        unique = "" if high is not None and high <= 1 else given.unique
        return Arrays(prefix, rest, given.low, high, contains, unique)

    def object(self, given: Objects) -> Objects | None:
        listed = dict(given.properties)
        for name in given.required:
            if name not in listed:
                found = given.at(name)
                listed[name] = NEVER if found is None else found
            if listed[name] == NEVER:
                return None
        low = given.low if given.low > len(given.required) else 0
        if given.high is not None and given.high < max(low, len(given.required)):
            return None
        others = tuple(keys for keys in given.others if keys.shape != NEVER)
        return replace(given, properties=tuple(listed.items()), others=others, low=low)

    # Turning around -------------------------------------------------------------------------------------------------

    def complement(self, shape: Shape) -> Shape:
        """What the shape does not allow. Raises `Unsayable`."""
        return self.minus(ANY, shape)

    def minus(self, base: Shape, shape: Shape) -> Shape:
        """What the base allows and the shape does not. Raises `Unsayable`."""
        if shape == ANY:
            return NEVER
        for atom in self.atoms(shape):
            if self.meet(base, Shape((atom,))) == NEVER:
                continue  # nothing of it is there, whatever it says
            rest = [Shape((kind,)) for kind in KINDS if type(kind) is not type(atom)]
            base = self.meet(base, self.join([*rest, *(Shape((one,)) for one in self._without(atom))]))
        return base

    def _without(self, atom: Atom) -> Iterable[Atom]:
        """The values of the same kind that an atom does not allow."""
        if isinstance(atom, Booleans):
            rest = Booleans().values - atom.values
            return [Booleans(rest)] if rest else []
        if isinstance(atom, Numbers):
            try:
                return [one.settled() for one in atom.complement()]
            except numbers.Unsayable as error:
                raise Unsayable(str(error)) from None
        if isinstance(atom, Strings):
            return [one for one in atom.complement() if not one.never()]
        if isinstance(atom, Arrays):
            return self._other_arrays(atom)
        if isinstance(atom, Objects):
            return self._other_objects(atom)
        assert isinstance(atom, Nulls)
        return []

    def _other_arrays(self, atom: Arrays) -> Iterable[Atom]:
        found: list[Arrays | None] = []
        if atom.unique:
            raise Unsayable("lists with equal items", "uniqueItems", atom.unique)
        if atom.low:
            found.append(Arrays(high=atom.low - 1))
        if atom.high is not None:
            found.append(Arrays(low=atom.high + 1))
        for place, shape in enumerate(atom.prefix):
            other = self.later(self.complement, shape)
            found.append(self.array(Arrays(prefix=(*[ANY] * place, other), low=place + 1)))
        if atom.rest not in (ANY, NEVER) or (atom.rest == NEVER and atom.high is None):
            if atom.prefix:
                raise Unsayable("lists in which some item after the first few is of another kind")
            found.append(Arrays(contains=(Contains(self.later(self.complement, atom.rest)),)))
        for one in atom.contains:
            if one.low:
                found.append(Arrays(contains=(Contains(one.shape, 0, one.low - 1, one.pointer),)))
            if one.high is not None:
                found.append(Arrays(contains=(Contains(one.shape, one.high + 1, None, one.pointer),)))
        return [one for one in found if one is not None]

    def _other_objects(self, atom: Objects) -> Iterable[Atom]:
        if atom.others != (Keys(),):
            raise Unsayable("objects in which some property is not of those named")
        found: list[Objects | None] = [Objects(properties=((name, NEVER),)) for name in atom.required]
        for name, shape in atom.properties:
            if shape != ANY:
                other = self.later(self.complement, shape)
                found.append(self.object(Objects(properties=((name, other),), required=(name,))))
        if atom.low:
            found.append(Objects(high=atom.low - 1, pointer=atom.pointer))
        if atom.high is not None:
            found.append(Objects(low=atom.high + 1, pointer=atom.pointer))
        return [one for one in found if one is not None]
