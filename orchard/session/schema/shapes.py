"""Shapes: one object for every kind of JSON value that a schema can ask for, with the Python value that it stands for.

A shape writes itself as JSON Schema, reads a finished JSON value into a Python value, writes such a value as JSON, and
grows: it makes of a value that is still being generated whatever can be shown already. Here are the plain ones; lists and
unions are in `containers`, objects in `record`, a JSON Schema from outside in `from_json`.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchard.session.schema.errors import UnreadableContentError, made, mismatch

if TYPE_CHECKING:
    from orchard.session.schema.book import Book


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"

    def __bool__(self) -> bool:
        return False


NOTHING: Any = _Nothing()
"""A value of which nothing can be shown yet."""

ALL_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Growth:
    """What is known of a container that grows: how many of its parts are done, their typed values, and its identity."""

    __slots__ = ("done", "finished", "identity", "typed")

    def __init__(self) -> None:
        self.done = 0
        self.typed: Any = None
        self.finished: Any = NOTHING
        self.identity: Any = None


Memo = dict[int, Growth]
"""Growth by the id of the raw container, which lives as long as the stream."""


def growth_of(value: Any, memo: Memo) -> Growth:
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = Growth()
    return known


class Shape(ABC):
    name = "value"
    kinds: frozenset[str] = ALL_KINDS
    """The JSON types that a value of this shape can have."""

    @abstractmethod
    def schema(self, book: Book) -> dict[str, Any]:
        """As it is written where it is used: a reference for what has a name."""

    def definition(self, book: Book, at: str) -> dict[str, Any]:
        """As it is written once, at the JSON pointer `at`."""
        return self.schema(book)

    @abstractmethod
    def read(self, value: Any, at: str) -> Any:
        """The Python value for a finished JSON value; `at` says where it stands, for the error."""

    def write(self, value: Any) -> Any:
        """The JSON value for a Python value."""
        from orchard.session.schema.content import plain_json

        return plain_json(value)

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether a Python value is of this shape."""

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        """What can be shown of a value. `depth` counts the unfinished values from this one inwards, each the last part of
        the one before; 0: it is finished."""
        if depth:
            return NOTHING
        try:
            return self.read(value, "")
        except UnreadableContentError:
            return NOTHING

    def begins(self, value: Any, depth: int) -> bool:
        """Whether a value, perhaps unfinished, can be of this shape."""
        return json_kind(value) in self.kinds and (depth > 0 or self.grow(value, 0, {}) is not NOTHING)

    def parts(self) -> Sequence[Shape]:
        """The shapes inside that a value cannot do without."""
        return ()


class Anything(Shape):
    """Any JSON value; Python's own dicts and lists stand for themselves."""

    name = "JSON"

    def schema(self, book: Book) -> dict[str, Any]:
        return {}

    def read(self, value: Any, at: str) -> Any:
        return value

    def holds(self, value: Any) -> bool:
        return True

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        """Finished parts are shared by all snapshots; what is open is copied."""
        if not depth or isinstance(value, str):
            return value
        shown = value.copy()
        if depth > 1:
            last = next(reversed(value)) if isinstance(value, dict) else len(value) - 1
            shown[last] = self.grow(value[last], depth - 1, memo)
        return shown


class Null(Shape):
    name = "null"
    kinds = frozenset({"null"})

    def schema(self, book: Book) -> dict[str, Any]:
        return {"type": "null"}

    def read(self, value: Any, at: str) -> None:
        if value is not None:
            raise mismatch(at, "null", value)

    def holds(self, value: Any) -> bool:
        return value is None


class Boolean(Shape):
    name = "bool"
    kinds = frozenset({"boolean"})

    def schema(self, book: Book) -> dict[str, Any]:
        return {"type": "boolean"}

    def read(self, value: Any, at: str) -> bool:
        if not isinstance(value, bool):
            raise mismatch(at, "true or false", value)
        return value

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)


class Number(Shape):
    """A number, whole or not, within `limits` (JSON Schema's keywords); `make` gives it another Python type."""

    kinds = frozenset({"number"})

    def __init__(self, *, whole: bool, make: Callable[[Any], Any] | None = None, kind: type | None = None) -> None:
        self.whole = whole
        self.make = make
        self.kind = kind or (int if whole else float)
        self.name = self.kind.__name__
        self.limits: dict[str, Any] = {}

    def schema(self, book: Book) -> dict[str, Any]:
        return {"type": "integer" if self.whole else "number", **self.limits}

    def read(self, value: Any, at: str) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not number
            or (isinstance(value, float) and not math.isfinite(value))
            or (self.whole and value != int(value))
        ):
            raise mismatch(at, "a whole number" if self.whole else "a number", value)
        if self.make is not None:
            return made(self.make, value, self.name, at)
        return int(value) if self.whole else float(value)

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.kind) and not isinstance(value, bool)


class Text(Shape):
    """A text. `patterns` are searched in it and `full` must match all of it; both are regular expressions."""

    kinds = frozenset({"string"})

    def __init__(self, *, make: Callable[[str], Any] | None = None, kind: type = str) -> None:
        self.make = make
        self.kind = kind
        self.name = kind.__name__
        self.full: tuple[str, ...] = ()
        self.patterns: tuple[str, ...] = ()
        self.limits: dict[str, Any] = {}

    def schema(self, book: Book) -> dict[str, Any]:
        full = [whole(pattern) for pattern in self.full] if book.exact else list(self.full)
        wanted = {"type": "string", **self.limits}
        match [*full, *self.patterns]:
            case []:
                return wanted
            case [pattern]:
                return {**wanted, "pattern": pattern}
            case several:
                return {**wanted, "allOf": [{"pattern": pattern} for pattern in several]}

    def read(self, value: Any, at: str) -> Any:
        if not isinstance(value, str):
            raise mismatch(at, "a text", value)
        return value if self.make is None else made(self.make, value, self.name, at)

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        return value if isinstance(value, str) else NOTHING

    def begins(self, value: Any, depth: int) -> bool:
        return isinstance(value, str)


def whole(pattern: str) -> str:
    """A JSON Schema pattern is searched for; this one matches a text from its beginning to its end."""
    return f"^(?:{pattern})$"


class Choice(Shape):
    """One of some JSON values, each with the Python value it stands for."""

    def __init__(self, name: str, choices: Mapping[str, tuple[Any, Any]], description: str | None = None) -> None:
        self.name = name
        self.choices = dict(choices)
        """JSON text → (JSON value, Python value)."""
        self.description = description
        self.kinds = frozenset(json_kind(value) for value, _ in self.choices.values())

    @classmethod
    def of(cls, name: str, pairs: Sequence[tuple[Any, Any]], description: str | None = None) -> Choice:
        keyed: dict[str, tuple[Any, Any]] = {}
        for value, stands_for in pairs:
            keyed.setdefault(json.dumps(value), (value, stands_for))
        return cls(name, keyed, description)

    def schema(self, book: Book) -> dict[str, Any]:
        values = [value for value, _ in self.choices.values()]
        kind = _KEYWORD.get(next(iter(self.kinds))) if len(self.kinds) == 1 else None
        if kind == "number" and all(isinstance(value, int) for value in values):
            kind = "integer"
        shown = {} if self.description is None else {"description": self.description}
        return {**({"type": kind} if kind else {}), **shown, "enum": values}

    def read(self, value: Any, at: str) -> Any:
        found = None if isinstance(value, (list, dict)) else self.choices.get(json.dumps(value))
        if found is None:
            wanted = ", ".join(itertools.islice(self.choices, 12))
            raise mismatch(at, f"one of {wanted}", value)
        return found[1]

    def write(self, value: Any) -> Any:
        for stored, stands_for in self.choices.values():
            if stands_for == value and type(stands_for) is type(value):
                return stored
        return super().write(value)

    def holds(self, value: Any) -> bool:
        return any(stands_for == value and type(stands_for) is type(value) for _, stands_for in self.choices.values())

    def begins(self, value: Any, depth: int) -> bool:
        if depth and isinstance(value, str):
            return any(isinstance(stored, str) and stored.startswith(value) for stored, _ in self.choices.values())
        return not depth and super().begins(value, depth)


_KEYWORD = {"string": "string", "number": "number", "boolean": "boolean", "null": "null"}


def json_kind(value: Any) -> str:
    """The JSON type of a value; whole numbers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kinds, name in (((int, float), "number"), (str, "string"), ((list, tuple), "array")):
        if isinstance(value, kinds):
            return name
    return "object"


def disjoint(one: Shape, other: Shape) -> bool:
    """Whether no JSON value is of both shapes, as far as can be seen at a glance."""
    if not one.kinds & other.kinds:
        return True
    both_choices = isinstance(one, Choice) and isinstance(other, Choice)
    return both_choices and not one.choices.keys() & other.choices.keys()  # type: ignore[attr-defined]
