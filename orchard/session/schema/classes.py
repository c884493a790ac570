"""Classes with fields become records: dataclasses (generable or not), TypedDicts, named tuples, and whatever says itself how
it is made from generated content."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin

from orchard.session.errors import InvalidGenerationSchemaError
from orchard.session.schema import pydantic_models
from orchard.session.schema.bounds import guided
from orchard.session.schema.containers import OneOf
from orchard.session.schema.guides import GenerationGuide
from orchard.session.schema.record import Field, Record
from orchard.session.schema.shapes import Null, Shape

if TYPE_CHECKING:
    from orchard.session.schema.types import Maker


def has_fields(kind: type) -> bool:
    return (
        dataclasses.is_dataclass(kind)
        or is_typed_dict(kind)
        or is_named_tuple(kind)
        or pydantic_models.is_model(kind)
        or says_itself(kind)
    )


def is_typed_dict(kind: type) -> bool:
    return issubclass(kind, dict) and hasattr(kind, "__total__") and hasattr(kind, "__required_keys__")


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_field_defaults")


def says_itself(kind: type) -> bool:
    """A class that has the methods of a generable one without the decorator."""
    return callable(getattr(kind, "generation_schema", None)) and callable(
        getattr(kind, "_from_generated_content", None)
    )


def shape_of_class(maker: Maker, kind: type, at: str, given: Sequence[Any] = (), alias: Any = None) -> Shape:
    """The shape of a class; `given` are the types for its parameters where it is generic, `alias` the type with them."""
    if pydantic_models.is_model(kind):
        return pydantic_models.shape_of_model(maker, kind, at)
    if not (dataclasses.is_dataclass(kind) or is_typed_dict(kind) or is_named_tuple(kind)):
        return pydantic_models.Wrapped.of_class(kind)
    name = "_".join([kind.__name__, *(getattr(one, "__name__", "type") for one in given)])
    hints = _filled(hints_of(kind, _classes_by_name(maker)), kind, given)
    record = Record(name, description_of(kind))
    maker.known[kind if alias is None else alias] = record
    if is_typed_dict(kind):
        _fill_typed_dict(maker, record, kind, hints)
        return record
    record.kind = kind
    record.build = lambda values: kind(**values)
    record.twin = lazy_twin(kind, hints, record)
    if is_named_tuple(kind):
        for attribute in kind._fields:  # type: ignore[attr-defined]
            has_default = attribute in kind._field_defaults  # type: ignore[attr-defined]
            add_field(maker, record, attribute, hints.get(attribute, Any), has_default=has_default)
    elif hasattr(kind, "__pydantic_fields__"):
        pydantic_models.fill(maker, record, kind.__pydantic_fields__, by_name=True)
    else:
        _fill_dataclass(maker, record, kind, hints)
    return record


def _fill_dataclass(maker: Maker, record: Record, kind: Any, hints: Mapping[str, Any]) -> None:
    generable = is_generable(kind)
    for part in dataclasses.fields(kind):
        if part.init:
            absent = dataclasses.MISSING
            add_field(
                maker,
                record,
                part.name,
                hints[part.name],
                description=part.metadata.get("description"),
                guides=part.metadata.get("guides", ()),
                has_default=part.default is not absent or part.default_factory is not absent,
                default_is_none=part.default is None,
                # The SDK leaves out only what is optional; elsewhere a default means that a field may be left out.
                defaults_are_required=generable,
            )


def _fill_typed_dict(maker: Maker, record: Record, kind: Any, hints: Mapping[str, Any]) -> None:
    for key, hint in hints.items():
        required = key in kind.__required_keys__
        while get_origin(hint) in (typing.Required, typing.NotRequired):
            required = get_origin(hint) is typing.Required
            hint = get_args(hint)[0]
        shape, description = shape_and_words(maker, hint, f"{record.name}.{key}")
        record.by_key[key] = Field(key, key, shape, required=required, description=description)


def add_field(
    maker: Maker,
    record: Record,
    name: str,
    hint: Any,
    *,
    description: str | None = None,
    guides: Sequence[GenerationGuide] = (),
    has_default: bool = False,
    default_is_none: bool = True,
    defaults_are_required: bool = False,
    required: bool | None = None,
) -> None:
    """Add a field of a class that is made by keyword. Optional fields are left out of the JSON where they are None."""
    at = f"{record.name}.{name}"
    if name in record.by_key:
        raise InvalidGenerationSchemaError(f"{record.name} has two fields {name!r}", hint="give each a name of its own")
    shape, noted = shape_and_words(maker, hint, at)
    nullable = isinstance(shape, OneOf) and any(isinstance(option, Null) for option in shape.options)
    if nullable and (defaults_are_required or default_is_none or not has_default):
        assert isinstance(shape, OneOf)
        shape = shape.without_null()
    else:
        nullable = False
    if required is None:
        required = not nullable and (defaults_are_required or not has_default)
    shape = guided(shape, guides, at)
    record.by_key[name] = Field(name, name, shape, required, nullable, has_default, description or noted)


def shape_and_words(maker: Maker, hint: Any, at: str) -> tuple[Shape, str | None]:
    """The shape of an annotation, and the description that stands in it."""
    if get_origin(hint) is typing.Annotated:
        return maker.annotated(get_args(hint)[0], hint.__metadata__, at)
    return maker.shape(hint, at), None


def is_generable(kind: Any) -> bool:
    return getattr(kind, "_generable", False) is True


def description_of(kind: type) -> str | None:
    """What a generable class is described as; for other classes the first line of their own docstring."""
    if is_generable(kind):
        return getattr(kind, "_generable_description", None)
    words = (kind.__dict__.get("__doc__") or "").strip()
    written_by_dataclass = words.startswith(f"{kind.__name__}(")
    return None if not words or written_by_dataclass else words.splitlines()[0]


def hints_of(kind: type, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The types of a class's fields. A generable class knows its own since it was decorated."""
    saved = kind.__dict__.get("_generable_hints")
    if saved is not None:
        return saved
    try:
        return typing.get_type_hints(kind, localns={**(names or {}), kind.__name__: kind}, include_extras=True)
    except Exception as error:
        message = f"the types of {kind.__name__} cannot be looked up: {error}"
        hint = "define what it refers to at the top of the module, or decorate it with generable where it is defined"
        raise InvalidGenerationSchemaError(message, hint=hint) from error


def _classes_by_name(maker: Maker) -> dict[str, Any]:
    return {kind.__name__: kind for kind in maker.known if isinstance(kind, type)}


def _filled(hints: dict[str, Any], kind: Any, given: Sequence[Any]) -> dict[str, Any]:
    """The hints of a generic class with types for its parameters."""
    types = dict(zip(getattr(kind, "__parameters__", ()), given))
    return {name: _with_types(hint, types) for name, hint in hints.items()} if types else hints


def _with_types(hint: Any, types: Mapping[Any, Any]) -> Any:
    if isinstance(hint, typing.TypeVar):
        return types.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(types.get(one, one) for one in parameters)] if parameters else hint


def lazy_twin(kind: Any, hints: Mapping[str, Any], record: Record) -> Callable[[], type]:
    made: list[type] = []

    def twin() -> type:
        if is_generable(kind) and "PartiallyGenerated" in kind.__dict__:
            return kind.PartiallyGenerated
        if not made:
            from orchard.session.schema.twin import twin_of

            made.append(twin_of(kind, hints, lambda: record))
        return made[0]

    return twin
