"""A Python function as a tool: its signature becomes a schema, and arguments that match the schema become a call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orchard.session.tools.docstrings import described
from orchard.session.tools.errors import BadToolError

if TYPE_CHECKING:
    from orchard.session.schema import GeneratedContent, GenerationSchema

_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_GUESSED = (str, bool, int, float)
"""Types that a default value may stand for where an annotation is missing."""


class Function:
    """`name`, `description` and `schema` of a function; `call(content)` calls it with what a model wrote."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or _name(function)
        self._parameters = _parameters(function, self.name)
        words, each = described(_documented(function))
        self.description = words
        self.schema = _schema(self.name, self._parameters, _hints(function, self.name), each)

    def call(self, content: GeneratedContent) -> Any:
        typed = self.schema.instance(content)
        by_position: list[Any] = []
        by_name: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            has_default = parameter.default is not parameter.empty
            absent = has_default and name not in content.value()
            value = parameter.default if absent else getattr(typed, name)
            if parameter.kind is _BY_POSITION:
                by_position.append(value)
            elif not absent:  # the function's own default counts
                by_name[name] = value
        return self.function(*by_position, **by_name)


def _name(function: Any) -> str:
    name = getattr(_documented(function), "__name__", "")
    if not name or name == "<lambda>":
        hint = "define it with `def`; its name is what the model calls it"
        raise BadToolError(f"a tool needs a name, and {function!r} has none", hint=hint)
    return str(name)


def _documented(function: Any) -> Any:
    """Where the name and the words about a function are: behind `partial`, or its class where an object is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function)


def _parameters(function: Any, name: str) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        hint = "wrap it in a function with types"
        raise BadToolError(f"the parameters of {name} are not known: {error}", hint=hint) from error
    for parameter in parameters.values():
        if parameter.kind in _MANY:
            hint = "name every parameter, so that the model can be told of it"
            raise BadToolError(f"{name} takes any number of arguments ({parameter})", hint=hint)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return {each: parameter for each, parameter in parameters.items() if each not in bound}


def _hints(function: Any, name: str) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    has_annotations = hasattr(function, "__annotations__") or inspect.ismethod(function)
    try:
        return typing.get_type_hints(function if has_annotations else type(function).__call__, include_extras=True)
    except Exception as error:  # whatever an annotation's text runs into
        hint = "define the types before the function, where it can see them"
        raise BadToolError(f"the types of {name} cannot be read: {error}", hint=hint) from error


def _schema(
    name: str, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], words: Mapping[str, str]
) -> GenerationSchema:
    """A schema of the parameters, by way of a dataclass that has them as its fields."""
    from orchard.session.schema import schema_for

    fields: list[tuple[str, Any, Any]] = []
    for each, parameter in parameters.items():
        hint = _hint(name, parameter, hints)
        told = words.get(each) if not _has_words(hint) else None
        metadata = {"description": told, "guides": ()} if told else {}
        # The default itself is the function's business; here it only says that the parameter may be left out.
        default = (
            dataclasses.MISSING if parameter.default is parameter.empty else None if parameter.default is None else ...
        )
        fields.append((each, hint, dataclasses.field(default=default, metadata=metadata)))
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", name)) + "Arguments"
    title = title if title.isidentifier() else "Arguments"
    made = dataclasses.make_dataclass(title, fields, kw_only=True)
    made.__doc__ = None
    return schema_for(made)


def _hint(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    if parameter.name in hints:
        return hints[parameter.name]
    for kind in _GUESSED:
        if type(parameter.default) is kind:
            return kind
    hint = f"write a type, such as {parameter.name}: str"
    raise BadToolError(f"the parameter {parameter.name!r} of {name} has no type", hint=hint)


def _has_words(hint: Any) -> bool:
    noted = getattr(hint, "__metadata__", ()) if typing.get_origin(hint) is typing.Annotated else ()
    return any(isinstance(note, str) or getattr(note, "description", None) for note in noted)
