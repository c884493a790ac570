"""Objects with named fields: dataclasses, Pydantic models, TypedDicts, named tuples, and schemas put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchard.core.frozen import frozen
from orchard.session.schema.errors import RETRY, UnreadableContentError, made, mismatch
from orchard.session.schema.shapes import NOTHING, Memo, Shape, disjoint, growth_of

if TYPE_CHECKING:
    from orchard.session.schema.book import Book


@frozen
class Field:
    """One field. `key` is its name in JSON, `attribute` its name in Python."""

    key: str
    attribute: str
    shape: Shape
    required: bool = True
    nullable: bool = False
    """Whether None stands for a field that is not there."""
    has_default: bool = False
    """Whether Python fills it in where it is not there."""
    description: str | None = None

    def schema(self, book: Book) -> dict[str, Any]:
        written = self.shape.schema(book)
        return {**written, "description": self.description} if self.description else written


class Record(Shape):
    """An object. `build` makes the Python value of its fields' values; without it the value is a dict."""

    kinds = frozenset({"object"})

    def __init__(
        self,
        name: str,
        description: str | None = None,
        *,
        kind: type | None = None,
        build: Callable[[dict[str, Any]], Any] | None = None,
        twin: Callable[[], type] | None = None,
    ) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.build = build
        self.twin = twin
        """Gives the class of a half-made value; without it that is a dict."""
        self.untyped = False
        """Whether no Python type stands behind it: a whole answer then stays generated content."""
        self.by_key: dict[str, Field] = {}

    @property
    def fields(self) -> Iterable[Field]:
        return self.by_key.values()

    def schema(self, book: Book) -> dict[str, Any]:
        return book.refer(self)

    def definition(self, book: Book, at: str) -> dict[str, Any]:
        written: dict[str, Any] = {} if book.exact else {"title": self.name}
        written["type"] = "object"
        if self.description:
            written["description"] = self.description
        written["properties"] = {field.key: field.schema(book) for field in self.fields}
        written["required"] = [field.key for field in self.fields if field.required]
        written["additionalProperties"] = False
        return written if book.exact else {**written, "x-order": list(self.by_key)}

    def read(self, value: Any, at: str) -> Any:
        values = self.values(value, at)
        return values if self.build is None else made(self.build, values, self.name, at)

    def values(self, value: Any, at: str) -> dict[str, Any]:
        """The fields' Python values by their names in Python."""
        if not isinstance(value, dict):
            raise mismatch(at, f"an object ({self.name})", value)
        values: dict[str, Any] = {}
        for field in self.fields:
            where = f"{at}.{field.key}" if at else field.key
            given = value.get(field.key)
            if given is None and (field.nullable or (field.key not in value and not field.required)):
                if not field.has_default and field.nullable:
                    values[field.attribute] = None
            elif field.key in value:
                values[field.attribute] = field.shape.read(given, where)
            elif not field.has_default:
                raise UnreadableContentError(f"{where} is missing in {self.name}", hint=RETRY)
        return values

    def write(self, value: Any) -> Any:
        written = {}
        for field in self.fields:
            mapping = isinstance(value, Mapping)
            part = value.get(field.attribute, NOTHING) if mapping else getattr(value, field.attribute, NOTHING)
            if part is NOTHING or (part is None and field.nullable):
                continue
            written[field.key] = field.shape.write(part)
        return written

    def holds(self, value: Any) -> bool:
        if self.kind is not None:
            return isinstance(value, self.kind)
        required = {field.attribute for field in self.fields if field.required}
        return isinstance(value, Mapping) and required <= value.keys() <= {field.attribute for field in self.fields}

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        if not isinstance(value, dict):
            return NOTHING
        growth = growth_of(value, memo)
        if growth.finished is not NOTHING:
            return growth.finished
        typed: dict[str, Any] = growth.typed if growth.typed is not None else {}
        growth.typed = typed
        finished = len(value) - (depth > 1)
        keys = list(value)
        for key in keys[growth.done : finished]:
            self._show(typed, key, value[key], 0, memo)
        growth.done = max(growth.done, finished)
        shown = dict(typed)
        if depth > 1:
            self._show(shown, keys[-1], value[keys[-1]], depth - 1, memo)
        if self.twin is not None:
            if growth.identity is None:
                growth.identity = _new_identity()
            shown = half_made(self.twin(), shown, growth.identity)
        if not depth:
            growth.finished = shown
        return shown

    def _show(self, shown: dict[str, Any], key: str, value: Any, depth: int, memo: Memo) -> None:
        field = self.by_key.get(key)
        item = NOTHING if field is None else field.shape.grow(value, depth, memo)
        if field is not None and item is not NOTHING:
            shown[field.attribute] = item

    def begins(self, value: Any, depth: int) -> bool:
        if not isinstance(value, dict) or not value.keys() <= self.by_key.keys():
            return False
        if not depth and not {field.key for field in self.fields if field.required} <= value.keys():
            return False
        last = len(value) - 1
        return all(
            (item is None and self.by_key[key].nullable)
            or self.by_key[key].shape.begins(item, depth - 1 if depth > 1 and place == last else 0)
            for place, (key, item) in enumerate(value.items())
        )

    def parts(self) -> Sequence[Shape]:
        return [field.shape for field in self.fields if field.required]

    def confusable(self, other: Record) -> bool:
        """Whether some JSON object could be either."""
        for one, two in ((self, other), (other, self)):
            if not {field.key for field in one.fields if field.required} <= two.by_key.keys():
                return False
        shared = [key for key, field in self.by_key.items() if key in other.by_key and field.required]
        return not any(
            other.by_key[key].required and disjoint(self.by_key[key].shape, other.by_key[key].shape) for key in shared
        )


def half_made(twin: type, values: dict[str, Any], identity: Any) -> Any:
    """An object of the class for half-made values; it has an `id` unless a field has that name."""
    half = twin(**values)
    if not getattr(twin, "_id_is_a_field", False):
        half.id = identity
    return half


def _new_identity() -> Any:
    from orchard.session.schema.content import GenerationID

    return GenerationID()


def ends(shape: Shape, inside: tuple[int, ...] = (), known: set[int] | None = None) -> bool:
    """Whether a shape has a finite value: an object that needs another of its own kind has none."""
    from orchard.session.schema.containers import OneOf

    known = set() if known is None else known
    if id(shape) in known:
        return True
    if id(shape) in inside:
        return False
    deeper = (*inside, id(shape))
    if isinstance(shape, OneOf):
        finite = any(ends(option, deeper, known) for option in shape.options)
    else:
        finite = all(ends(part, deeper, known) for part in shape.parts())
    if finite:
        known.add(id(shape))
    return finite
