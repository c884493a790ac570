"""Shapes that hold others: lists, tuples, maps, and one of several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchard.session.schema.errors import UnreadableContentError, mismatch
from orchard.session.schema.record import Record
from orchard.session.schema.shapes import NOTHING, Choice, Memo, Null, Number, Shape, growth_of

if TYPE_CHECKING:
    from orchard.session.schema.book import Book


class ListOf(Shape):
    """A list of one shape, as a list, tuple or set in Python."""

    kinds = frozenset({"array"})

    def __init__(self, item: Shape, container: Callable[[Sequence[Any]], Any] = list) -> None:
        self.item = item
        self.container = container
        self.name = f"ListOf{item.name[:1].upper()}{item.name[1:]}"
        self.limits: dict[str, Any] = {}

    def schema(self, book: Book) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(book), **self.limits}

    def read(self, value: Any, at: str) -> Any:
        if not isinstance(value, list):
            raise mismatch(at, "a list", value)
        items = [self.item.read(item, f"{at}[{index}]") for index, item in enumerate(value)]
        try:
            return self.container(items)
        except TypeError as error:  # a set of what cannot be in one
            raise UnreadableContentError(f"{at or 'the answer'}: {error}") from error

    def write(self, value: Any) -> Any:
        return [self.item.write(item) for item in value]

    def holds(self, value: Any) -> bool:
        return isinstance(value, (list, tuple, set, frozenset)) and all(map(self.item.holds, value))

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        return _grown_list(value, depth, memo, lambda index: self.item)

    def begins(self, value: Any, depth: int) -> bool:
        return isinstance(value, list) and _parts_begin(value, depth, lambda index: self.item)

    def parts(self) -> Sequence[Shape]:
        return (self.item,) if self.limits.get("minItems", 0) else ()


class TupleOf(Shape):
    """A list of a fixed length, each place with a shape of its own."""

    kinds = frozenset({"array"})

    def __init__(self, items: Sequence[Shape]) -> None:
        self.items = tuple(items)
        self.name = f"TupleOf{len(items)}"

    def schema(self, book: Book) -> dict[str, Any]:
        places = [item.schema(book) for item in self.items]
        ends = {"items": False, "minItems": len(places), "maxItems": len(places)}
        return {"type": "array", **({"prefixItems": places} if places else {}), **ends}

    def read(self, value: Any, at: str) -> Any:
        if not isinstance(value, list) or len(value) != len(self.items):
            raise mismatch(at, f"a list of {len(self.items)}", value)
        return tuple(shape.read(item, f"{at}[{index}]") for index, (shape, item) in enumerate(zip(self.items, value)))

    def write(self, value: Any) -> Any:
        return [shape.write(item) for shape, item in zip(self.items, value)]

    def holds(self, value: Any) -> bool:
        same = isinstance(value, (list, tuple)) and len(value) == len(self.items)
        return same and all(shape.holds(item) for shape, item in zip(self.items, value))

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        return _grown_list(value, depth, memo, self._at)

    def begins(self, value: Any, depth: int) -> bool:
        return isinstance(value, list) and _parts_begin(value, depth, self._at)

    def parts(self) -> Sequence[Shape]:
        return self.items

    def _at(self, index: int) -> Shape | None:
        return self.items[index] if index < len(self.items) else None


class MapOf(Shape):
    """An object with any keys of one shape (texts, choices of texts, whole numbers) and values of one shape."""

    kinds = frozenset({"object"})

    def __init__(self, key: Shape, value: Shape) -> None:
        self.key, self.value = key, value
        self.name = f"MapOf{value.name[:1].upper()}{value.name[1:]}"
        self.limits: dict[str, Any] = {}

    def schema(self, book: Book) -> dict[str, Any]:
        value = self.value.schema(book)
        if isinstance(self.key, Choice):
            keys = [stored for stored, _ in self.key.choices.values()]
            return {
                "type": "object",
                "properties": dict.fromkeys(keys, value),
                "additionalProperties": False,
                **self.limits,
            }
        if isinstance(self.key, Number):
            numbers = {"patternProperties": {r"^-?(?:0|[1-9]\d{0,15})$": value}, "additionalProperties": False}
            return {"type": "object", **numbers, **self.limits}
        return {"type": "object", "additionalProperties": value, **self.limits}

    def read(self, value: Any, at: str) -> Any:
        if not isinstance(value, dict):
            raise mismatch(at, "an object", value)
        return {self._key(key, at): self.value.read(item, f"{at}.{key}") for key, item in value.items()}

    def _key(self, key: str, at: str) -> Any:
        if not isinstance(self.key, Number):
            return self.key.read(key, f"a key of {at or 'the answer'}")
        try:
            return int(key)
        except ValueError:
            raise mismatch(f"a key of {at or 'the answer'}", "a whole number", key) from None

    def write(self, value: Any) -> Any:
        return {str(self.key.write(key)): self.value.write(item) for key, item in value.items()}

    def holds(self, value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            self.key.holds(key) and self.value.holds(item) for key, item in value.items()
        )

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        if not isinstance(value, dict):
            return NOTHING
        growth = growth_of(value, memo)
        typed: dict[Any, Any] = growth.typed if growth.typed is not None else {}
        growth.typed = typed
        finished = len(value) - (depth > 1)
        for key, item in itertools.islice(value.items(), growth.done, finished):
            self._show(typed, key, self.value.grow(item, 0, memo))
        growth.done = max(growth.done, finished)
        shown = dict(typed)
        if depth > 1:
            last = next(reversed(value))
            self._show(shown, last, self.value.grow(value[last], depth - 1, memo))
        return shown

    def _show(self, shown: dict[Any, Any], key: str, item: Any) -> None:
        try:
            if item is not NOTHING:
                shown[self._key(key, "")] = item
        except UnreadableContentError:
            return

    def begins(self, value: Any, depth: int) -> bool:
        return isinstance(value, dict) and _parts_begin(value, depth, lambda key: self.value)


class OneOf(Shape):
    """One of several shapes. Objects that could be taken for each other are told apart by a tag: `{"Cat": {…}}`."""

    def __init__(self, options: Sequence[Shape]) -> None:
        self.options = tuple(options)
        self.name = "Or".join(option.name[:1].upper() + option.name[1:] for option in options)
        self.description: str | None = None

    @property
    def kinds(self) -> frozenset[str]:  # type: ignore[override]  # its options may be filled in later
        return frozenset().union(*(option.kinds for option in self.options))

    @cached_property
    def tags(self) -> dict[int, str]:
        """Place of an option → its tag. Empty where no two objects can be confused."""
        records = [(place, option) for place, option in enumerate(self.options) if isinstance(option, Record)]
        if not any(one.confusable(other) for (_, one), (_, other) in itertools.combinations(records, 2)):
            return {}
        tags: dict[int, str] = {}
        for place, option in records:
            number, tag = 1, option.name
            while tag in tags.values():
                number += 1
                tag = f"{option.name}{number}"
            tags[place] = tag
        return tags

    def without_null(self) -> Shape:
        rest = [option for option in self.options if not isinstance(option, Null)]
        return rest[0] if len(rest) == 1 else OneOf(rest)

    def schema(self, book: Book) -> dict[str, Any]:
        options = [option.schema(book) for option in self.options]
        for place, tag in self.tags.items():
            options[place] = {
                "type": "object",
                "properties": {tag: options[place]},
                "required": [tag],
                "additionalProperties": False,
            }
        return {**({"description": self.description} if self.description else {}), "anyOf": options}

    def read(self, value: Any, at: str) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # 3 is also a float and 3.0 also an int; the one that it is exactly goes first.
        for place in sorted(
            range(len(self.options)), key=lambda place: number and not self.options[place].holds(value)
        ):
            inner, known = self._untagged(place, value)
            if known and (place in self.tags or self.options[place].begins(inner, 0)):
                try:
                    return self.options[place].read(inner, at)
                except UnreadableContentError:
                    if place in self.tags:
                        raise  # the tag says that it was meant to be this
        raise mismatch(at, " or ".join(option.name for option in self.options), value)

    def _untagged(self, place: int, value: Any) -> tuple[Any, bool]:
        tag = self.tags.get(place)
        if tag is None:
            return value, True
        tagged = isinstance(value, dict) and list(value) == [tag]
        return (value[tag], True) if tagged else (None, False)

    def write(self, value: Any) -> Any:
        for place, option in enumerate(self.options):
            if option.holds(value):
                written = option.write(value)
                return {self.tags[place]: written} if place in self.tags else written
        return super().write(value)

    def holds(self, value: Any) -> bool:
        return any(option.holds(value) for option in self.options)

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        """Nothing while more than one option is possible: what was shown must not turn into something else."""
        if not depth:
            return super().grow(value, depth, memo) if self._all_plain else self._decided(value, depth, memo)
        return self._decided(value, depth, memo)

    def _decided(self, value: Any, depth: int, memo: Memo) -> Any:
        possible = []
        for place, option in enumerate(self.options):
            inner, known = self._untagged(place, value)
            inside = max(depth - 1, 0) if place in self.tags else depth
            if known and option.begins(inner, inside):
                possible.append((option, inner, inside))
        if not possible or (depth and len(possible) > 1):
            return NOTHING
        option, inner, inside = possible[0]
        return option.grow(inner, inside, memo)

    @cached_property
    def _all_plain(self) -> bool:
        return not self.kinds & {"object", "array"}

    def begins(self, value: Any, depth: int) -> bool:
        for place, option in enumerate(self.options):
            tag = self.tags.get(place)
            if tag is not None and isinstance(value, dict) and not value and depth:
                return True
            inner, known = self._untagged(place, value)
            if known and option.begins(inner, max(depth - 1, 0) if tag is not None else depth):
                return True
        return False


def _grown_list(value: Any, depth: int, memo: Memo, shape_at: Callable[[int], Shape | None]) -> Any:
    if not isinstance(value, list):
        return NOTHING
    growth = growth_of(value, memo)
    typed: list[Any] = growth.typed if growth.typed is not None else []
    growth.typed = typed
    finished = len(value) - (depth > 1)
    for index in range(growth.done, finished):
        shape = shape_at(index)
        item = NOTHING if shape is None else shape.grow(value[index], 0, memo)
        if item is not NOTHING:
            typed.append(item)
    growth.done = max(growth.done, finished)
    shown = list(typed)
    shape = shape_at(len(value) - 1) if depth > 1 else None
    item = NOTHING if shape is None else shape.grow(value[-1], depth - 1, memo)
    return shown if item is NOTHING else [*shown, item]


def _parts_begin(value: Any, depth: int, shape_at: Callable[[Any], Shape | None]) -> bool:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for place, key in enumerate(keys):
        shape = shape_at(key)
        if shape is None or not shape.begins(value[key], depth - 1 if depth > 1 and place == len(keys) - 1 else 0):
            return False
    return True
