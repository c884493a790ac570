"""`@generable`: makes a class one that a model can generate."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeVar, get_args, overload, runtime_checkable

from orchard.session.schema import classes, pydantic_models
from orchard.session.schema.content import GeneratedContent
from orchard.session.schema.errors import GenerableDecoratorError
from orchard.session.schema.schema import GenerationSchema, Property
from orchard.session.schema.twin import twin_of

T = TypeVar("T")


class ConvertibleFromGeneratedContent(Protocol):
    """Can be made of generated content."""

    @classmethod
    def _from_generated_content(cls, content: GeneratedContent) -> Any: ...


class ConvertibleToGeneratedContent(Protocol):
    """Can be written as generated content."""

    @property
    def generated_content(self) -> GeneratedContent: ...


class _ByMark(type(Protocol)):  # type: ignore[misc]
    """Looks for the decorator's mark. Python's own check would look at every member, and run the properties among them."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return getattr(thing if isinstance(thing, type) else type(thing), "_generable", False) is True


@runtime_checkable
class Generable(ConvertibleFromGeneratedContent, ConvertibleToGeneratedContent, Protocol, metaclass=_ByMark):
    """A class (or an object of one) that `generable` was put on. It is not there to be inherited from."""

    _generable: bool
    _generable_description: str | None
    PartiallyGenerated: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        raise TypeError(f"{cls.__name__} cannot inherit from Generable: put the decorator @fm.generable on it instead")

    @classmethod
    def generation_schema(cls) -> GenerationSchema: ...


@overload
def generable(arg: type[T], /) -> type[T]: ...
@overload
def generable(arg: str | None = None, /) -> Callable[[type[T]], type[T]]: ...


def generable(arg: Any = None, /) -> Any:
    """Put it on a class: `@generable`, `@generable()`, or `@generable("what it is")`. The class becomes a dataclass unless it is
    one (or an enum, or a Pydantic model), and gets `generation_schema()`, `generated_content` and `PartiallyGenerated`."""
    names = sys._getframe(1).f_locals  # where the class is defined: it may name others from there
    if arg is None or isinstance(arg, str):
        return lambda cls: make_generable(cls, arg, names)
    return make_generable(arg, None, names)


def make_generable(cls: Any, description: str | None, names: Mapping[str, Any]) -> Any:
    if not isinstance(cls, type):
        raise GenerableDecoratorError(
            f"generable goes on classes, and {cls!r} is a {type(cls).__name__}.{_example('Cat', 'name: str')}",
            hint="put it above a class whose fields have types",
        )
    kind: Any = cls
    if not issubclass(kind, Enum):
        kind = kind if pydantic_models.is_model(kind) else _as_dataclass(kind)
        kind._generable_hints = _looked_up(kind, names)
    kind._generable = True
    kind._generable_description = description
    kind._generable_shape = None
    kind.generation_schema = classmethod(_generation_schema)
    kind._from_generated_content = classmethod(_from_generated_content)
    kind.generated_content = property(_generated_content)
    kind.PartiallyGenerated = (
        kind if issubclass(kind, Enum) else twin_of(kind, kind._generable_hints, lambda: _shape(kind))
    )
    return kind


def _as_dataclass(kind: Any) -> Any:
    if not any(_annotations(base) for base in kind.__mro__[:-1]):
        raise GenerableDecoratorError(
            f"{kind.__name__} has no fields: a field of a generable class has a type."
            f"{_example(kind.__name__, 'name: str', 'age: int')}",
            hint='write `name: str`, and not `name = ""`',
        )
    if "__dataclass_fields__" in kind.__dict__:
        return kind
    try:
        return dataclasses.dataclass(kind)
    except Exception as error:
        factory = "tags: list[str] = field(default_factory=list)"
        raise GenerableDecoratorError(
            f"{kind.__name__} cannot become a dataclass: {error}.{_example(kind.__name__, 'name: str', factory)}",
            hint="lists and dicts as defaults are made by default_factory; fields with a default come last",
        ) from error


def _looked_up(kind: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    if pydantic_models.is_model(kind):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    try:
        hints = typing.get_type_hints(kind, localns={**names, kind.__name__: kind}, include_extras=True)
    except Exception as error:
        itself = f'parent: Optional["{kind.__name__}"] = None'
        raise GenerableDecoratorError(
            f"the type hints of {kind.__name__} cannot be looked up: {error}.{_example(kind.__name__, 'name: str', itself)}",
            hint="define a type before the class that uses it; plain dataclasses may refer to each other in any order",
        ) from error
    return {part.name: hints[part.name] for part in dataclasses.fields(kind) if part.init}


def _annotations(kind: type) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(kind, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(kind)


def _example(name: str, *fields: str) -> str:
    return "\n\nFor example:\n  @fm.generable\n  class " + "\n      ".join([f"{name}:", *fields])


# What the decorator adds to a class.


def _generation_schema(cls: Any, description: str | None = None) -> GenerationSchema:
    described = description or cls._generable_description
    if issubclass(cls, Enum):
        return GenerationSchema(cls, described)
    notes = {part.name: part.metadata for part in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    properties = []
    for name, hint in cls._generable_hints.items():
        note: Mapping[str, Any] = notes.get(name, {})
        properties.append(Property(name, hint, note.get("description"), note.get("guides", ())))
    return GenerationSchema.from_class(cls, described, properties, _nested_in(cls))


def _nested_in(cls: Any) -> list[type]:
    """Every generable class that can be reached from one."""
    found: dict[Any, None] = {}
    waiting = list(cls._generable_hints.values())
    while waiting:
        hint = waiting.pop(0)
        if classes.is_generable(hint) and hint is not cls and hint not in found:
            found[hint] = None
            waiting += getattr(hint, "_generable_hints", {}).values()
        waiting += get_args(hint)
    return list(found)


def _shape(cls: Any) -> Any:
    if cls.__dict__.get("_generable_shape") is None:
        cls._generable_shape = cls.generation_schema().shape
    return cls._generable_shape


def _from_generated_content(cls: Any, content: GeneratedContent) -> Any:
    return cls.generation_schema().instance(content)


def _generated_content(self: Any) -> GeneratedContent:
    return GeneratedContent.made(_shape(type(self)).write(self))
