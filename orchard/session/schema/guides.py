"""Guides: what a field may hold beyond its type, written next to it. `bounds` puts them into the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import Enum
from typing import Any


class GuideType(Enum):
    """The kinds of guides; values as in the SDK."""

    anyOf = "enum"
    constant = "constant"
    count = "count"
    element = "element"
    maxItems = "maxItems"
    maximum = "maximum"
    minItems = "minItems"
    minimum = "minimum"
    range = "range"
    regex = "regex"


class GenerationGuide:
    """One guide: its type and its value. Whether it fits the type of a field is checked when a schema is made of it."""

    def __init__(self, guide_type: GuideType, value: Any = None) -> None:
        self.guide_type = guide_type
        self.value = value

    def __repr__(self) -> str:
        return f"GenerationGuide.{self.guide_type.name}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, GenerationGuide)
        return same and (self.guide_type, self.value) == (other.guide_type, other.value)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.guide_type, repr(self.value)))

    @classmethod
    def anyOf(cls, values: list[str]) -> GenerationGuide:
        """One of these texts."""
        return cls(GuideType.anyOf, values)

    @classmethod
    def constant(cls, value: str) -> GenerationGuide:
        """Exactly this text."""
        return cls(GuideType.constant, value)

    @classmethod
    def count(cls, count: int | tuple[int, int]) -> GenerationGuide:
        """A list of exactly so many items, or of a number from one to another."""
        return cls(GuideType.count, count)

    @classmethod
    def element(cls, guide: GenerationGuide) -> GenerationGuide:
        """Every item of a list follows this guide."""
        return cls(GuideType.element, guide)

    @classmethod
    def max_items(cls, value: int) -> GenerationGuide:
        """A list of at most so many items."""
        return cls(GuideType.maxItems, value)

    @classmethod
    def maximum(cls, value: int | float) -> GenerationGuide:
        """A number of at most this."""
        return cls(GuideType.maximum, value)

    @classmethod
    def min_items(cls, value: int) -> GenerationGuide:
        """A list of at least so many items."""
        return cls(GuideType.minItems, value)

    @classmethod
    def minimum(cls, value: int | float) -> GenerationGuide:
        """A number of at least this."""
        return cls(GuideType.minimum, value)

    @classmethod
    def range(cls, range_tuple: tuple[float, float]) -> GenerationGuide:
        """A number from one to another, both included."""
        return cls(GuideType.range, range_tuple)

    @classmethod
    def regex(cls, pattern: str) -> GenerationGuide:
        """The whole text matches this pattern."""
        return cls(GuideType.regex, pattern)


def guide(
    description: str | None = None,
    *,
    anyOf: list[str] | None = None,
    constant: str | None = None,
    count: int | tuple[int, int] | None = None,
    element: GenerationGuide | None = None,
    max_items: int | None = None,
    maximum: int | float | None = None,
    min_items: int | None = None,
    minimum: int | float | None = None,
    range: tuple[float, float] | None = None,
    regex: str | None = None,
) -> Any:
    """A field of a dataclass with a description and guides, as in `age: int = guide("In years", range=(0, 20))`. It can
    stand inside `Annotated` too. A value of the wrong kind raises `ValueError` at once."""
    given = {
        GuideType.anyOf: anyOf,
        GuideType.constant: constant,
        GuideType.count: count,
        GuideType.element: element,
        GuideType.maxItems: max_items,
        GuideType.maximum: maximum,
        GuideType.minItems: min_items,
        GuideType.minimum: minimum,
        GuideType.range: range,
        GuideType.regex: regex,
    }
    guides = [GenerationGuide(kind, value) for kind, value in given.items() if value is not None]
    for one in guides:
        fits, wanted = _WANTED[one.guide_type]
        if not fits(one.value):
            raise ValueError(f"{_ARGUMENT.get(one.guide_type, one.guide_type.name)} is {one.value!r}: use {wanted}")
    return field(metadata={"description": description, **({"guides": guides} if guides else {})})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: Any, one: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(one, value))


def _is_count(value: Any) -> bool:
    return (is_whole(value) and value > 0) or (_is_pair(value, is_whole) and 0 <= value[0] <= value[1])


def _is_limit(value: Any) -> bool:
    return is_whole(value) and value >= 0


_ARGUMENT = {GuideType.maxItems: "max_items", GuideType.minItems: "min_items"}
_WANTED: dict[GuideType, tuple[Callable[[Any], bool], str]] = {
    GuideType.anyOf: (
        lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
        "a list of texts",
    ),
    GuideType.constant: (lambda value: isinstance(value, str), "a text"),
    GuideType.count: (_is_count, "a whole number from 1, or a pair (fewest, most)"),
    GuideType.element: (lambda value: isinstance(value, GenerationGuide), "a GenerationGuide"),
    GuideType.maxItems: (_is_limit, "a whole number from 0"),
    GuideType.maximum: (is_number, "a number"),
    GuideType.minItems: (_is_limit, "a whole number from 0"),
    GuideType.minimum: (is_number, "a number"),
    GuideType.range: (lambda value: _is_pair(value, is_number), "a pair of numbers (lowest, highest)"),
    GuideType.regex: (lambda value: isinstance(value, str), "a text"),
}


def wanted_instead(one: GenerationGuide) -> str:
    """What the value of a guide should be; empty where it is that. For guides that were made without `guide`."""
    fits, wanted = _WANTED[one.guide_type]
    return "" if fits(one.value) else wanted
