"""`GenerationSchema`: what an answer must look like, made from a Python type, from properties, or from a JSON Schema.

It writes itself in the SDK's dialect of JSON Schema and as a constraint for the engine, describes itself for a prompt, and
reads what was generated, whole or unfinished. Nothing is checked when it is made; the first use raises what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, TypeVar

from orchard.generate.constraint import Constraint
from orchard.session.errors import InvalidGenerationSchemaError
from orchard.session.schema import classes
from orchard.session.schema.book import Book
from orchard.session.schema.check import check
from orchard.session.schema.content import GeneratedContent, read_json
from orchard.session.schema.errors import RETRY, UnreadableContentError
from orchard.session.schema.from_json import JsonSchema
from orchard.session.schema.guides import GenerationGuide
from orchard.session.schema.partial import Partial, PartialReader
from orchard.session.schema.record import Record, ends
from orchard.session.schema.shapes import Shape
from orchard.session.schema.types import Maker
from orchard.session.schema.words import LONGEST, words_for

T = TypeVar("T")


class Property:
    """One property of a schema that is put together by hand. `required` None: unless its type is optional."""

    def __init__(
        self,
        name: str,
        type_class: Any,
        description: str | None = None,
        guides: Sequence[GenerationGuide] = (),
        *,
        required: bool | None = None,
    ) -> None:
        self.name, self.type_class, self.description = name, type_class, description
        self.guides = list(guides)
        self.required = required

    def __repr__(self) -> str:
        return f"Property({self.name!r}, {self.type_class!r})"


class GenerationSchema:
    """`type_class` is a type, or only a name where `properties` say what it is made of. Properties may refer to the types of
    `dynamic_nested_types`, by class or by name."""

    def __init__(
        self,
        type_class: Any,
        description: str | None = None,
        properties: list[Property] | None = None,
        dynamic_nested_types: Sequence[GenerationSchema] = (),
        *,
        _shape: Shape | None = None,
    ) -> None:
        self.type_class = type_class
        self.description = description
        self.properties = list(properties or ())
        self.dynamic_nested_types = list(dynamic_nested_types)
        self._by_hand = properties is not None
        if _shape is not None:
            self.__dict__["shape"] = _shape

    @classmethod
    def from_class(cls, kind: Any, description: str | None, properties: list[Property], nested: Sequence[type]) -> Any:
        """Of a generable class: it knows its shape itself, and lists its properties for whoever wants to see them."""
        schema = cls(kind, description, properties, [cls(one) for one in nested])
        schema._by_hand = False
        return schema

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any]) -> GenerationSchema:
        """Of a JSON Schema; answers are `GeneratedContent`."""
        return cls(None, _shape=JsonSchema(schema))

    @property
    def name(self) -> str:
        return self.shape.name

    @cached_property
    def shape(self) -> Shape:
        """What it is made of, checked."""
        shape = self._made_by_hand() if self._by_hand else self._made_of_type()
        if not ends(shape):
            raise InvalidGenerationSchemaError(
                f"{shape.name} needs another {shape.name} inside, without end",
                hint="make that field optional or a list",
            )
        return shape

    def _made_of_type(self) -> Shape:
        shape = Maker(self._nested()).shape(self.type_class, getattr(self.type_class, "__name__", None) or "the type")
        if isinstance(shape, Record) and self.description and not isinstance(self.type_class, Shape):
            shape.description = self.description
        return shape

    def _made_by_hand(self) -> Record:
        kind = self.type_class
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", None)
        if not name:
            raise InvalidGenerationSchemaError(f"{kind!r} has no name", hint="give a class or the name of a type")
        described = self.description or (classes.description_of(kind) if isinstance(kind, type) else None)
        record = Record(name, described)
        if is_dataclass(kind) and isinstance(kind, type):
            record.kind, record.build = kind, lambda values: kind(**values)
        else:
            record.untyped = True
        maker = Maker({**self._nested(), kind: record, name: record})
        for one in self.properties:
            classes.add_field(
                maker,
                record,
                one.name,
                one.type_class,
                description=one.description,
                guides=one.guides,
                has_default=one.required is False,
                required=one.required,
            )
        return record

    def _nested(self) -> dict[Any, Shape]:
        nested: dict[Any, Shape] = {}
        for schema in self.dynamic_nested_types:
            if schema._by_hand:
                nested[schema.type_class] = nested[schema.name] = schema.shape
        return nested

    def to_dict(self) -> dict[str, Any]:
        """The SDK's dialect of JSON Schema."""
        return Book(self.shape, exact=False).written()

    def constraint(self) -> Constraint:
        """What the engine holds an answer to."""
        return Constraint.json_schema(self._exact)

    @cached_property
    def _exact(self) -> dict[str, Any]:
        return Book(self.shape, exact=True).written()

    def for_prompt(self, longest: int = LONGEST) -> str:
        """A short description of the JSON, for a model to read."""
        return words_for(self.to_dict(), longest)

    def read(self, text: str) -> GeneratedContent:
        """A finished answer, checked against the schema."""
        content = GeneratedContent.made(read_json(text))
        self._with_raw(lambda: check(self._exact, content.value()), text)
        return content

    def instance(self, content: GeneratedContent) -> Any:
        """An object of the type that the schema was made of; the content itself where there is no type."""
        shape = self.shape
        if isinstance(shape, JsonSchema) or (isinstance(shape, Record) and shape.untyped):
            return content
        return self._with_raw(lambda: shape.read(content.value(), ""), content)

    def values(self, content: GeneratedContent) -> dict[str, Any]:
        """The properties of an object as Python values by name: the arguments of a function whose schema this is."""
        shape = self.shape
        if not isinstance(shape, Record):
            value = content.value()
            return value if isinstance(value, dict) else {}
        return self._with_raw(lambda: shape.values(content.value(), ""), content)

    def _with_raw(self, reading: Callable[[], T], source: str | GeneratedContent) -> T:
        """Whatever cannot be read is told with the text that it was read from."""
        try:
            return reading()
        except RecursionError:
            error = UnreadableContentError("the answer is nested too deeply", hint=RETRY)
        except UnreadableContentError as found:
            error = found
        error.raw = source if isinstance(source, str) else source.to_json()
        raise error

    def partial(self, text: str) -> Partial | None:
        """A snapshot of an unfinished answer; None while there is nothing to show. For a stream, `reader` is faster."""
        reader = self.reader()
        reader.push(text)
        return reader.latest

    def reader(self) -> PartialReader:
        """Takes an answer piece by piece and gives snapshots."""
        return PartialReader(self)

    def __repr__(self) -> str:
        return f"GenerationSchema({json.dumps(self.to_dict(), ensure_ascii=False)})"


def schema_for(kind: Any) -> GenerationSchema:
    """The schema of any supported type, of a JSON Schema as a dict, or the schema itself. What is wrong with it raises here."""
    if isinstance(kind, GenerationSchema):
        schema = kind
    elif isinstance(kind, Mapping):
        schema = GenerationSchema.from_json_schema(kind)
    elif classes.is_generable(kind) and isinstance(kind, type):
        schema = kind.generation_schema()  # type: ignore[attr-defined]
    else:
        schema = GenerationSchema(kind)
    schema.constraint()
    return schema
