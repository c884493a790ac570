"""Errors of making a schema and of reading what was generated, each with the SDK's error as its parent.

Two of them are also a `TypeError` or a `ValueError`, which is what the SDK raises in the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from orchard.session.errors import DecodingFailureError, InvalidGenerationSchemaError

Problem = Literal["duplicateType", "duplicateProperty", "emptyTypeChoices", "undefinedReferences"]


class GenerableDecoratorError(InvalidGenerationSchemaError):
    """`generable` was put on something that it cannot be put on."""

    code = "generable"


class UnsupportedTypeError(InvalidGenerationSchemaError, TypeError):
    """A Python type that no JSON is known for."""

    code = "unsupported-type"


class SchemaError(InvalidGenerationSchemaError):
    """Dynamic schemas that do not fit together; `kind` says how, `names` which types or properties."""

    code = "schema"

    def __init__(self, kind: Problem, names: tuple[str, ...], message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind, self.names = kind, names


class UnreadableContentError(DecodingFailureError, ValueError):
    """What was generated is no JSON, or no value of the type that was asked for."""


def mismatch(at: str, wanted: str, value: object) -> UnreadableContentError:
    """The error for a value that is not what a schema wants there."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return UnreadableContentError(f"{at or 'the answer'} should be {wanted}, but is {shown}", hint=RETRY)


def made(make: Callable[[Any], Any], value: Any, name: str, at: str) -> Any:
    """What a class makes of a value; whatever it objects to is a mismatch."""
    try:
        return make(value)
    except UnreadableContentError:
        raise
    except RecursionError:
        raise UnreadableContentError("the answer is nested too deeply", hint=RETRY) from None
    except Exception as error:
        raise UnreadableContentError(f"{at or 'the answer'} is no {name}: {error}", hint=RETRY) from error


RETRY = (
    "ask again; where the model is held to the schema this cannot happen, elsewhere show it the schema in the prompt"
)
