"""Schemas that are known only at run time, put together from parts that may refer to each other by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchard.session.schema.bounds import guided, limited
from orchard.session.schema.containers import ListOf, OneOf
from orchard.session.schema.errors import SchemaError
from orchard.session.schema.guides import GenerationGuide
from orchard.session.schema.record import Field, Record
from orchard.session.schema.schema import GenerationSchema
from orchard.session.schema.shapes import Choice, Null, Shape
from orchard.session.schema.types import Maker


class DynamicProperty:
    """One property of a dynamic object."""

    def __init__(
        self, name: str, schema: DynamicGenerationSchema, description: str | None = None, *, is_optional: bool = False
    ) -> None:
        self.name, self.schema, self.description, self.is_optional = name, schema, description, is_optional


class DynamicGenerationSchema:
    """An object with a name (`properties`) or a choice with one (`any_of` schemas or texts). The class methods make the parts
    without a name; `build` makes a schema of it. `represent_nil`: optional properties are written as null, not left out."""

    Property = DynamicProperty

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        *,
        properties: Sequence[DynamicProperty] | None = None,
        any_of: Sequence[DynamicGenerationSchema | str] | None = None,
        represent_nil: bool = False,
    ) -> None:
        if (properties is None) == (any_of is None):
            raise SchemaError(
                "emptyTypeChoices",
                (str(name),),
                f"{name}: an object has properties, a choice has any_of",
                hint="give exactly one of the two",
            )
        self.name, self.description = name, description
        self.properties = None if properties is None else tuple(properties)
        self.any_of = None if any_of is None else tuple(any_of)
        self.represent_nil = represent_nil
        self._part: tuple[str, Any] | None = None

    @classmethod
    def _of(cls, kind: str, value: Any) -> DynamicGenerationSchema:
        made = cls.__new__(cls)
        made.name = made.description = made.properties = made.any_of = None
        made.represent_nil, made._part = False, (kind, value)
        return made

    @classmethod
    def array_of(
        cls, item: DynamicGenerationSchema, minimum: int | None = None, maximum: int | None = None
    ) -> DynamicGenerationSchema:
        """A list."""
        return cls._of("array", (item, minimum, maximum))

    @classmethod
    def reference_to(cls, name: str) -> DynamicGenerationSchema:
        """Another schema by its name."""
        return cls._of("reference", name)

    @classmethod
    def of_type(cls, type_class: Any, guides: Sequence[GenerationGuide] = ()) -> DynamicGenerationSchema:
        """A Python type."""
        return cls._of("type", (type_class, tuple(guides)))

    @classmethod
    def null(cls) -> DynamicGenerationSchema:
        return cls._of("null", None)

    def build(self, dependencies: Sequence[DynamicGenerationSchema] = ()) -> GenerationSchema:
        """The schema, with what it refers to. Names that are used twice or not at all raise `SchemaError`."""
        return GenerationSchema(None, _shape=_Builder(self, dependencies).root())


class _Builder:
    def __init__(self, root: DynamicGenerationSchema, dependencies: Sequence[DynamicGenerationSchema]) -> None:
        self._root = root
        self._given: dict[str, DynamicGenerationSchema] = {}
        self._missing: dict[str, None] = {}
        self._made: dict[str, Shape] = {}
        self._maker = Maker()
        for schema in (root, *dependencies):
            self._note(schema)

    def _note(self, schema: DynamicGenerationSchema) -> None:
        """Remember the named schemas, those inside others too."""
        if schema.name is not None:
            known = self._given.get(schema.name)
            if known is schema:
                return
            if known is not None:
                message = f"two schemas are named {schema.name!r}"
                raise SchemaError("duplicateType", (schema.name,), message, hint="give each a name of its own")
            self._given[schema.name] = schema
        for inner in schema.properties or ():
            self._note(inner.schema)
        for option in schema.any_of or ():
            if isinstance(option, DynamicGenerationSchema):
                self._note(option)
        if schema._part is not None and schema._part[0] == "array":
            self._note(schema._part[1][0])

    def root(self) -> Shape:
        made = self._shape(self._root, "the schema")
        if self._missing:
            names = tuple(self._missing)
            message = f"nothing is named {', '.join(map(repr, names))}"
            raise SchemaError("undefinedReferences", names, message, hint="pass it in dependencies")
        return GenerationSchema(made).shape  # which also looks whether it ever ends

    def _shape(self, schema: DynamicGenerationSchema, at: str) -> Shape:
        if schema._part is not None:
            return self._unnamed(*schema._part, at)
        name = schema.name or "Type"
        if name not in self._made:
            if schema.properties is not None:
                self._made[name] = record = Record(name, schema.description)
                record.untyped = True
                self._fill(record, schema)
            else:
                self._made[name] = self._choice(schema, name)
        return self._made[name]

    def _unnamed(self, kind: str, value: Any, at: str) -> Shape:
        if kind == "null":
            return Null()
        if kind == "type":
            return guided(self._maker.shape(value[0], at), value[1], at)
        if kind == "reference":
            if value in self._given:
                return self._shape(self._given[value], value)
            self._missing[value] = None
            return Null()
        item, low, high = value
        made: Shape = ListOf(self._shape(item, f"{at}[]"))
        made = made if low is None else limited(made, "minItems", low, at)
        return made if high is None else limited(made, "maxItems", high, at)

    def _fill(self, record: Record, schema: DynamicGenerationSchema) -> None:
        for part in schema.properties or ():
            if part.name in record.by_key:
                names = (record.name, part.name)
                message = f"{record.name} has two properties named {part.name!r}"
                raise SchemaError("duplicateProperty", names, message, hint="give each a name of its own")
            shape = self._shape(part.schema, f"{record.name}.{part.name}")
            as_null = part.is_optional and schema.represent_nil
            record.by_key[part.name] = Field(
                part.name,
                part.name,
                OneOf([shape, Null()]) if as_null else shape,
                required=as_null or not part.is_optional,
                description=part.description,
            )

    def _choice(self, schema: DynamicGenerationSchema, name: str) -> Shape:
        options = schema.any_of or ()
        if not options:
            raise SchemaError("emptyTypeChoices", (name,), f"{name} has nothing to choose from", hint="give any_of")
        texts = [option for option in options if isinstance(option, str)]
        shapes: list[Shape] = [Choice.of(name, [(text, text) for text in texts], schema.description)] if texts else []
        shapes += [self._shape(option, name) for option in options if isinstance(option, DynamicGenerationSchema)]
        if len(shapes) == 1:
            return shapes[0]
        union = OneOf(shapes)
        union.description = schema.description
        union.name = name
        return union
