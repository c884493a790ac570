"""Pydantic models, without importing Pydantic unless somebody uses it.

A model becomes a record of its fields, so that what it shares with other classes (guides of nested generables, unions, dates)
is treated alike; the object is made by `model_validate`, so that every validator of the model runs. A type that only Pydantic
knows (an e-mail address, a secret) is described by Pydantic's own schema and read by Pydantic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from orchard.session.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from orchard.session.schema.containers import OneOf
from orchard.session.schema.errors import UnsupportedTypeError, made
from orchard.session.schema.from_json import JsonSchema, enforceable
from orchard.session.schema.record import Field, Record
from orchard.session.schema.shapes import Memo, Null, Shape

if TYPE_CHECKING:
    from orchard.session.schema.book import Book
    from orchard.session.schema.types import Maker


def is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def knows(kind: Any) -> bool:
    """Whether Pydantic can describe a type that has told it how."""
    return "pydantic" in sys.modules and hasattr(kind, "__get_pydantic_core_schema__")


def the_model_itself(kind: Any, known: Mapping[Any, Shape]) -> Shape | None:
    """The shape behind the mark that Pydantic leaves where a generic model contains itself; None for everything else."""
    mark = getattr(kind, "type_ref", None)
    if not isinstance(mark, str):
        return None
    for model, shape in known.items():
        about: Mapping[str, Any] = getattr(model, "__pydantic_generic_metadata__", {})
        generic = about.get("origin")
        if generic is not None and f":{id(generic)}[" in mark:
            return shape
    return None


def shape_of_model(maker: Maker, kind: Any, at: str) -> Shape:
    if not kind.__pydantic_complete__:
        kind.model_rebuild()
    if "root" in kind.model_fields and issubclass(kind, sys.modules["pydantic"].RootModel):
        wrapped = Wrapped(kind, make=kind.model_validate, unwrap=lambda value: value.root)
        maker.known[kind] = wrapped
        wrapped.inner = _annotated(maker, kind.model_fields["root"], at)[0]
        return wrapped
    from orchard.session.schema.classes import description_of, lazy_twin

    hints = {name: field.annotation for name, field in kind.model_fields.items()}
    record = Record(kind.__name__, description_of(kind), kind=kind)
    maker.known[kind] = record
    record.twin = lazy_twin(kind, hints, record)
    fill(maker, record, kind.model_fields, by_name=False)
    keys = {field.attribute: field.key for field in record.fields}
    record.build = lambda values: kind.model_validate({keys[name]: value for name, value in values.items()})
    return record


def fill(maker: Maker, record: Record, fields: Mapping[str, Any], *, by_name: bool) -> None:
    """Add the fields of a model, or of a dataclass of Pydantic's, which is made by the names of its fields."""
    for name, field in fields.items():
        key = name if by_name else _key(name, field, record.name)
        if key in record.by_key:
            raise InvalidGenerationSchemaError(f"{record.name} has two fields {key!r}", hint="change an alias")
        shape, description = _annotated(maker, field, f"{record.name}.{name}")
        optional = isinstance(shape, OneOf) and any(isinstance(option, Null) for option in shape.options)
        required = field.is_required()
        nullable = optional and not required and field.get_default(call_default_factory=False) is None
        if nullable:
            assert isinstance(shape, OneOf)
            shape = shape.without_null()
        record.by_key[key] = Field(key, name, shape, required, nullable, not required, field.description or description)


def _key(name: str, field: Any, owner: str) -> str:
    alias = field.validation_alias if field.validation_alias is not None else field.alias
    choices = [alias] if alias is None or isinstance(alias, str) else getattr(alias, "choices", [])
    for choice in choices:
        if choice is None or isinstance(choice, str):
            return choice or name
    raise InvalidGenerationSchemaError(
        f"{owner}.{name} is read from inside another value, which cannot be generated", hint="give it a plain alias"
    )


def _annotated(maker: Maker, field: Any, at: str) -> tuple[Shape, str | None]:
    """The shape of a field. What only Pydantic knows stays JSON here: the model itself makes a value of it."""
    from orchard.session.schema.classes import shape_and_words

    if not any(map(_changes_the_input, field.metadata)):
        try:
            shape, description = shape_and_words(maker, field.annotation, at)
            for note in field.metadata:
                shape = maker.annotated(shape, [note], at)[0]
            return shape, description
        except (UnsupportedTypeError, UnsupportedGuideError):
            pass
    notes = tuple(field.metadata)
    return foreign(Annotated[(field.annotation, *notes)] if notes else field.annotation, at).inner, None


def _changes_the_input(note: Any) -> bool:
    """Whether a note makes a field's JSON something else than its type says."""
    pydantic = sys.modules["pydantic"]
    return note is pydantic.Json or isinstance(note, (pydantic.Json, pydantic.PlainValidator))


def foreign(kind: Any, at: str) -> Wrapped:
    """A type that only Pydantic knows."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(kind)
        schema = enforceable(adapter.json_schema())
    except PydanticUserError as error:
        message = f"{at}: {getattr(kind, '__name__', kind)} is no type that can be generated"
        hint = "Pydantic has no JSON Schema for it either: use a text or a number, and make it of that"
        raise UnsupportedTypeError(message, hint=hint) from error
    name = getattr(kind, "__name__", "value")
    wrapped = Wrapped(
        kind if isinstance(kind, type) else None,
        make=lambda value: adapter.validate_json(json.dumps(value)),
        unwrap=lambda value: adapter.dump_python(value, mode="json"),
        name=name,
        raw=True,
    )
    wrapped.inner = JsonSchema(schema, name)
    return wrapped


class Wrapped(Shape):
    """A shape whose Python value is made of another's by a function; `raw`: of its JSON."""

    def __init__(
        self,
        kind: type | None,
        *,
        make: Callable[[Any], Any],
        unwrap: Callable[[Any], Any],
        name: str | None = None,
        raw: bool = False,
    ) -> None:
        self.kind = kind
        self.raw = raw
        self.name = name or (kind.__name__ if kind else "value")
        self.inner: Shape = Null()
        self._make, self._unwrap = make, unwrap

    @classmethod
    def of_class(cls, kind: Any) -> Wrapped:
        """Around a class that says itself how it is made of generated content."""
        from orchard.session.schema.content import GeneratedContent

        wrapped = cls(
            kind,
            make=lambda value: kind._from_generated_content(GeneratedContent.made(value)),
            unwrap=lambda value: value.generated_content.value(),
            raw=True,
        )
        wrapped.inner = kind.generation_schema().shape
        return wrapped

    @property
    def kinds(self) -> frozenset[str]:  # type: ignore[override]  # of what it wraps, which may be filled in later
        return self.inner.kinds

    def schema(self, book: Book) -> dict[str, Any]:
        return self.inner.schema(book) if self.raw else book.refer(self)

    def definition(self, book: Book, at: str) -> dict[str, Any]:
        return self.inner.definition(book, at) if self.raw else self.inner.schema(book)

    def read(self, value: Any, at: str) -> Any:
        inner = value if self.raw else self.inner.read(value, at)
        return made(self._make, inner, self.name, at)

    def write(self, value: Any) -> Any:
        written = self._unwrap(value)
        return written if self.raw else self.inner.write(written)

    def holds(self, value: Any) -> bool:
        return self.kind is not None and isinstance(value, self.kind)

    def grow(self, value: Any, depth: int, memo: Memo) -> Any:
        return self.inner.grow(value, depth, memo)

    def begins(self, value: Any, depth: int) -> bool:
        return self.inner.begins(value, depth)

    def parts(self) -> tuple[Shape, ...]:
        return (self.inner,)
