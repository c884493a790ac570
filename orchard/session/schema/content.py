"""What was generated, as JSON with an identity, and the Python values that are written as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Set
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import Any

from orchard.core.errors import UsageError
from orchard.session.schema.errors import UnreadableContentError


class GenerationID:
    """An identity that stays the same through the snapshots of one answer."""

    __slots__ = ("_id",)

    def __init__(self) -> None:
        import uuid

        self._id = str(uuid.uuid4())

    def __str__(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"GenerationID({self._id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationID) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)


class GeneratedContent:
    """A JSON value that a model wrote, or that is to look like it. `id` tells answers apart."""

    def __init__(self, content_dict: Any = None, id: GenerationID | None = None) -> None:
        self._value = {} if content_dict is None else plain_json(content_dict)
        self._complete = True
        self.id = id or GenerationID()

    @classmethod
    def made(cls, value: Any, *, complete: bool = True, id: GenerationID | None = None) -> GeneratedContent:
        """Around a JSON value as it is, without a copy. The value must not be changed afterwards."""
        content = cls.__new__(cls)
        content._value, content._complete, content.id = value, complete, id or GenerationID()
        return content

    @classmethod
    def from_json(cls, json_str: str) -> GeneratedContent:
        return cls.made(read_json(json_str))

    def to_json(self) -> str:
        return json.dumps(self._value, ensure_ascii=False, separators=(",", ":"))

    def value(self, type_class: Any = None, for_property: str | None = None) -> Any:
        """The whole value or one property (None where it is not there), as a value of a type if one is given."""
        value: Any = self._value
        if for_property is not None:
            value = value.get(for_property) if isinstance(value, dict) else None
        if type_class is None:
            return value
        from orchard.session.schema.types import shape_of

        shape = shape_of(type_class, loose=True)
        if value is None and for_property is not None and "null" not in shape.kinds:
            return [] if shape.kinds == {"array"} else None  # as in the SDK
        try:
            return shape.read(value, for_property or "")
        except UnreadableContentError as error:
            error.raw = self.to_json()
            raise

    @property
    def is_complete(self) -> bool:
        """False in a snapshot of an answer that is still being written."""
        return self._complete

    @property
    def generated_content(self) -> GeneratedContent:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratedContent) and self._value == other._value and self._complete == other._complete

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"GeneratedContent({self.to_json()}{'' if self._complete else ', unfinished'})"


def read_json(text: str) -> Any:
    """A JSON text as Python values; a typed error with the text where it is none."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise UnreadableContentError("the answer is nested too deeply", raw=text, hint="ask for less") from None
    except (ValueError, TypeError) as error:
        message = f"the answer is no JSON: {error}"
        hint = "an answer that was cut off needs more tokens (maximum_response_tokens)"
        raise UnreadableContentError(message, raw=text if isinstance(text, str) else repr(text), hint=hint) from error


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def plain_json(value: Any, at: str = "content") -> Any:
    """A Python value as JSON's own kinds: dicts with text keys, lists, texts, numbers, booleans, None."""
    if isinstance(value, Enum):
        inner = value.value
        return plain_json(inner, at) if inner is None or isinstance(inner, (bool, int, float, str)) else value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{at} is {value}, which JSON cannot hold", hint="use a finite number")
        return value
    if isinstance(value, GeneratedContent):
        return value.value()
    if isinstance(value, Mapping):
        return {_key(key, at): plain_json(item, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, Set)) and not hasattr(value, "_asdict"):
        return [plain_json(item, f"{at}[{place}]") for place, item in enumerate(value)]
    return _of_object(value, at)


def _key(key: Any, at: str) -> str:
    written = plain_json(key, f"a key of {at}")
    if isinstance(written, bool) or not isinstance(written, (str, int)):
        raise UsageError(f"a key of {at} is {key!r}, which is no text", hint="keys of JSON objects are texts")
    return str(written)


def _of_object(value: Any, at: str) -> Any:
    if isinstance(getattr(type(value), "generated_content", None), property):
        return value.generated_content.value()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(value, "_asdict"):
        return plain_json(value._asdict(), at)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain_json(item, f"{at}.{name}") for name, item in named.items()}
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        from orchard.session.schema.texts import write_duration

        return write_duration(value)
    kind = type(value).__module__.partition(".")[0], type(value).__name__
    if kind == ("decimal", "Decimal") and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if kind[0] in ("uuid", "pathlib"):
        return str(value)
    raise UsageError(
        f"{at} is a {type(value).__name__}, which is not written as JSON", hint="use texts, numbers, lists, dicts"
    )
