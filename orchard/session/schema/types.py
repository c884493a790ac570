"""From a Python type to its shape: one function for everything that can stand in an annotation.

Types are recognised by what they are (`get_origin`, `isinstance`), never by how they print, which differs between versions
of Python. Classes with fields are in `classes`, Pydantic models in `pydantic_models`.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, get_args, get_origin

from orchard.session.errors import InvalidGenerationSchemaError
from orchard.session.schema import classes, pydantic_models
from orchard.session.schema.bounds import guided, limited, limited_length
from orchard.session.schema.containers import ListOf, MapOf, OneOf, TupleOf
from orchard.session.schema.errors import UnsupportedTypeError
from orchard.session.schema.from_json import JsonSchema
from orchard.session.schema.guides import GenerationGuide
from orchard.session.schema.shapes import Anything, Boolean, Choice, Null, Number, Shape, Text
from orchard.session.schema.texts import fixed_text

_LISTS: dict[Any, Any] = {
    list: list,
    abc.Sequence: list,
    abc.MutableSequence: list,
    abc.Iterable: list,
    abc.Collection: list,
    set: set,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: frozenset,
}
_MAPS = (dict, abc.Mapping, abc.MutableMapping)
_WRAPPERS = {typing.Required, typing.NotRequired, typing.Final, getattr(typing, "ReadOnly", typing.Final)}
_SUPPORTED = (
    "use str, int, float, bool, list[...], dict[str, ...], Optional, unions, Literal, Enum, dates, UUID, Decimal, "
    "dataclasses, generable classes, TypedDict or Pydantic models"
)


class Maker:
    """Makes the shapes of one schema. Every class is made once, so that recursion ends and definitions are shared."""

    def __init__(self, named: Mapping[Any, Shape] | None = None, *, loose: bool = False) -> None:
        self.known: dict[Any, Shape] = dict(named or {})
        """Shapes by their class, or by a name that an annotation may use."""
        self.loose = loose
        """Whether a list without a type for its items is any list: for values, where nothing has to be generated."""
        self._aliases: list[Any] = []

    def shape(self, kind: Any, at: str) -> Shape:
        from orchard.session.schema.schema import GenerationSchema

        if isinstance(kind, Shape):
            return kind
        if isinstance(kind, GenerationSchema):
            return kind.shape
        if isinstance(kind, Mapping):
            return JsonSchema(kind)
        if isinstance(kind, (str, typing.ForwardRef)):
            return self._by_name(kind if isinstance(kind, str) else kind.__forward_arg__, at)
        if kind is None or kind is type(None):
            return Null()
        if kind is Any or kind is object:
            return Anything()
        if _hashable(kind) and kind in self.known:
            return self.known[kind]
        if hasattr(kind, "__supertype__"):  # NewType
            return self.shape(kind.__supertype__, at)
        if _is_alias(kind):
            return self._alias(kind, at)
        if isinstance(kind, typing.TypeVar):
            return self.shape(kind.__bound__ or typing.Union[kind.__constraints__ or Any], at)  # noqa: UP007
        if get_origin(kind) is not None:
            return self._generic(kind, at)
        if isinstance(kind, type):
            return self._class(kind, at)
        itself = pydantic_models.the_model_itself(kind, self.known)
        if itself is not None:
            return itself
        raise UnsupportedTypeError(f"{at}: {kind!r} is no type that can be generated", hint=_SUPPORTED)

    def _by_name(self, name: str, at: str) -> Shape:
        if name in self.known:
            return self.known[name]
        raise InvalidGenerationSchemaError(
            f"{at}: nothing is known of the type {name!r}", hint="define it before it is used, or pass its schema along"
        )

    def _alias(self, kind: Any, at: str) -> Shape:
        if any(kind is open_alias for open_alias in self._aliases):
            hint = "use a dataclass or a TypedDict for what contains itself"
            raise UnsupportedTypeError(f"{at}: the type alias {kind.__name__} contains itself", hint=hint)
        self._aliases.append(kind)
        try:
            return self.shape(kind.__value__, at)
        finally:
            self._aliases.pop()

    def _generic(self, kind: Any, at: str) -> Shape:
        origin, given = get_origin(kind), get_args(kind)
        if origin is typing.Annotated:
            return self.annotated(given[0], kind.__metadata__, at)[0]
        if origin is typing.Union or origin is types.UnionType:
            return self._union(given, at)
        if origin is typing.Literal:
            return _literal(given, at)
        if origin in _WRAPPERS:
            return self.shape(given[0], at)
        if origin in _LISTS:
            return ListOf(self.shape(given[0], f"{at}[]"), _LISTS[origin])
        if origin is tuple:
            if len(given) == 2 and given[1] is Ellipsis:
                return ListOf(self.shape(given[0], f"{at}[]"), tuple)
            return TupleOf([self.shape(item, f"{at}[{place}]") for place, item in enumerate(given)])
        if origin in _MAPS:
            return self._map(given[0], given[1], at)
        if isinstance(origin, type) and classes.has_fields(origin):
            return classes.shape_of_class(self, origin, at, given=given, alias=kind)
        raise UnsupportedTypeError(f"{at}: {kind!r} is no type that can be generated", hint=_SUPPORTED)

    def _map(self, key_type: Any, value_type: Any, at: str) -> Shape:
        key = self.shape(key_type, f"{at} (key)")
        plain = isinstance(key, Text) or (isinstance(key, Number) and key.whole)
        if not plain and not (isinstance(key, Choice) and key.kinds == {"string"}):
            raise UnsupportedTypeError(
                f"{at}: keys of a JSON object are texts, not {key.name}", hint="use dict[str, ...]"
            )
        return MapOf(key, self.shape(value_type, f"{at}.*"))

    def _union(self, given: Sequence[Any], at: str) -> Shape:
        options: list[Shape] = []
        for option in (self.shape(one, at) for one in given):
            options += option.options if isinstance(option, OneOf) else [option]
        options.sort(key=lambda option: isinstance(option, Null))
        return options[0] if len(options) == 1 else OneOf(options)

    def annotated(self, kind: Any, metadata: Sequence[Any], at: str) -> tuple[Shape, str | None]:
        """The shape of a type under what is noted beside it, and its description."""
        shape, description = self.shape(kind, at), None
        for note in metadata:
            if isinstance(note, GenerationGuide):
                shape = guided(shape, [note], at)
            elif isinstance(note, str):
                description = note
            elif isinstance(note, dataclasses.Field):  # what `guide` gives
                description = note.metadata.get("description") or description
                shape = guided(shape, note.metadata.get("guides", ()), at)
            elif type(note).__module__.partition(".")[0] in ("pydantic", "annotated_types"):
                description = getattr(note, "description", None) or description
                shape = self.constrained(shape, note, at)
        return shape, description

    def constrained(self, shape: Shape, note: Any, at: str) -> Shape:
        """The shape under a constraint of `annotated_types` or Pydantic; what is not of their common kinds is left to the
        validator that brought it."""
        for inner in getattr(note, "metadata", None) or ():
            shape = self.constrained(shape, inner, at)
        for attribute, keyword in _CONSTRAINTS.items():
            value = getattr(note, attribute, None)
            if value is not None:
                shape = limited(shape, keyword, getattr(value, "pattern", value), at)
        least, most = getattr(note, "min_length", None), getattr(note, "max_length", None)
        return shape if least is None and most is None else limited_length(shape, least, most, at)

    def _class(self, kind: type, at: str) -> Shape:
        plain = _plain(kind) or fixed_text(kind)
        if plain is not None:
            return plain
        if kind in _LISTS or kind is tuple:
            if self.loose:
                return ListOf(Anything(), _LISTS.get(kind, kind))
            hint = f"say what is in it, such as {kind.__name__}[str]"
            raise UnsupportedTypeError(f"{at}: {kind.__name__} does not say what its items are", hint=hint)
        if kind in _MAPS:
            return MapOf(Text(), Anything())
        if issubclass(kind, Enum):
            return _enum(kind, at)
        if classes.has_fields(kind):
            return classes.shape_of_class(self, kind, at)
        if pydantic_models.knows(kind):
            return pydantic_models.foreign(kind, at)
        raise UnsupportedTypeError(f"{at}: {kind.__name__} is no type that can be generated", hint=_SUPPORTED)


_CONSTRAINTS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
}


def shape_of(kind: Any, *, named: Mapping[Any, Shape] | None = None, loose: bool = False) -> Shape:
    """The shape of a type, or an error that names what is wrong with it."""
    return Maker(named, loose=loose).shape(kind, getattr(kind, "__name__", None) or "the type")


def _plain(kind: type) -> Shape | None:
    if kind is bool:
        return Boolean()
    if kind.__module__ == "decimal" and kind.__name__ == "Decimal":
        return Number(whole=False, make=lambda value: kind(repr(value)), kind=kind)
    if kind.__module__.partition(".")[0] == "pathlib":
        return Text(make=kind, kind=kind)
    for base in (int, float, str):
        if issubclass(kind, base) and not issubclass(kind, Enum):
            make = None if kind is base else kind
            return Text(make=make, kind=kind) if base is str else Number(whole=base is int, make=make, kind=kind)
    return None


def _literal(values: Sequence[Any], at: str) -> Choice:
    pairs = []
    for value in values:
        stored = value.value if isinstance(value, Enum) else value
        if stored is not None and not isinstance(stored, (str, int, bool)):
            raise UnsupportedTypeError(
                f"{at}: {value!r} is not written as JSON", hint="use texts, whole numbers or booleans"
            )
        pairs.append((stored, value))
    return Choice.of("choice", pairs)


def _enum(kind: type[Enum], at: str) -> Choice:
    members = list(kind)
    if not members:
        raise InvalidGenerationSchemaError(f"{at}: {kind.__name__} has no members", hint="give it at least one")
    by_value = all(member.value is None or isinstance(member.value, (str, int, float, bool)) for member in members)
    pairs = [(member.value if by_value else member.name, member) for member in members]
    return Choice.of(kind.__name__, pairs, getattr(kind, "_generable_description", None))


def _is_alias(kind: Any) -> bool:
    """Whether it was made by a `type X = …` statement."""
    extensions = sys.modules.get("typing_extensions")
    sources = [typing, extensions] if extensions else [typing]
    known = tuple(alias for source in sources if (alias := getattr(source, "TypeAliasType", None)))
    return bool(known) and isinstance(kind, known)


def _hashable(kind: Any) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True
