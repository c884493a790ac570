"""Guides and constraints put onto shapes: which fit which type, how several are joined, and when they contradict.

A guide on a type that it says nothing about raises `UnsupportedGuideError`; guides that leave no value at all raise
`InvalidGenerationSchemaError`. Both name the field and its type.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

from orchard.session.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from orchard.session.schema.containers import ListOf, MapOf, OneOf
from orchard.session.schema.from_json import why_not
from orchard.session.schema.guides import GenerationGuide, GuideType, wanted_instead
from orchard.session.schema.shapes import Boolean, Choice, Null, Number, Shape, Text

_LOWER = {"minimum", "exclusiveMinimum", "minItems", "minLength", "minProperties"}
_UPPER = {"maximum", "exclusiveMaximum", "maxItems", "maxLength", "maxProperties"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_LENGTH = {
    Text: ("minLength", "maxLength"),
    ListOf: ("minItems", "maxItems"),
    MapOf: ("minProperties", "maxProperties"),
}


def guided(shape: Shape, guides: Sequence[GenerationGuide], at: str) -> Shape:
    """The shape under all these guides."""
    for guide in guides:
        wanted = wanted_instead(guide)
        if wanted:
            message = f"{at}: the guide {guide.guide_type.name} has the value {guide.value!r}"
            raise InvalidGenerationSchemaError(message, hint=f"use {wanted}")
        shape = _guided(shape, guide, at)
    return shape


def _guided(shape: Shape, guide: GenerationGuide, at: str) -> Shape:
    kind, value = guide.guide_type, guide.value
    if isinstance(shape, OneOf):
        return _in_the_one_that_fits(shape, lambda option: _guided(option, guide, at), guide.guide_type.name, at)
    if isinstance(shape, Boolean):
        return shape  # as in the SDK, where guides on a bool say nothing
    if isinstance(shape, Number) and kind in (GuideType.minimum, GuideType.maximum, GuideType.range):
        low, high = value if kind is GuideType.range else (value, value)
        if kind is not GuideType.maximum:
            shape = limited(shape, "minimum", low, at)
        return shape if kind is GuideType.minimum else limited(shape, "maximum", high, at)
    if isinstance(shape, ListOf):
        return _guided_list(shape, guide, at)
    if isinstance(shape, (Text, Choice)) and shape.kinds == {"string"}:
        if kind in (GuideType.anyOf, GuideType.constant):
            return _chosen(shape, [value] if kind is GuideType.constant else value, at)
        if kind is GuideType.regex:
            return _matched(shape, value, at)
    raise _unsupported(kind.name, shape, at)


def _guided_list(shape: ListOf, guide: GenerationGuide, at: str) -> Shape:
    kind, value = guide.guide_type, guide.value
    if kind is GuideType.count:
        low, high = value if isinstance(value, tuple) else (value, value)
        return limited(limited(shape, "minItems", low, at), "maxItems", high, at)
    if kind in (GuideType.minItems, GuideType.maxItems):
        return limited(shape, kind.value, value, at)
    if kind is GuideType.element or (kind is GuideType.anyOf and shape.item.kinds == {"string"}):
        narrowed = copy.copy(shape)
        inner = value if kind is GuideType.element else guide
        narrowed.item = guided(shape.item, [inner], f"{at}[]")
        return narrowed
    raise _unsupported(kind.name, shape, at)


def limited(shape: Shape, keyword: str, value: Any, at: str) -> Shape:
    """The shape under a keyword of JSON Schema (`minimum`, `maxItems`, `pattern` …)."""
    if isinstance(shape, OneOf):
        return _in_the_one_that_fits(shape, lambda option: limited(option, keyword, value, at), keyword, at)
    if keyword == "pattern" and isinstance(shape, Text):
        _check_pattern(value, at)
        narrowed = copy.copy(shape)
        narrowed.patterns = (*shape.patterns, value)
        return narrowed
    of_numbers = isinstance(shape, Number) and keyword in _OF_NUMBERS
    of_length = any(isinstance(shape, kind) and keyword in words for kind, words in _OF_LENGTH.items())
    if not of_numbers and not of_length:
        raise _unsupported(keyword, shape, at)
    assert isinstance(shape, (Number, Text, ListOf, MapOf))
    narrowed_too = copy.copy(shape)
    narrowed_too.limits = _joined(shape.limits, keyword, _bound(shape, keyword, value, at))
    _check_limits(narrowed_too, at)
    return narrowed_too


def limited_length(shape: Shape, least: int | None, most: int | None, at: str) -> Shape:
    """The shape under a shortest and a longest length, whatever length means for it."""
    if isinstance(shape, OneOf):
        return _in_the_one_that_fits(shape, lambda option: limited_length(option, least, most, at), "length", at)
    for kind, (low, high) in _OF_LENGTH.items():
        if isinstance(shape, kind):
            shape = shape if not least else limited(shape, low, least, at)
            return shape if most is None else limited(shape, high, most, at)
    raise _unsupported("length", shape, at)


def _in_the_one_that_fits(shape: OneOf, narrow: Any, what: str, at: str) -> Shape:
    options: list[Shape] = []
    fitted = 0
    for option in shape.options:
        try:
            options.append(option if isinstance(option, (Null, Boolean)) else narrow(option))
            fitted += not isinstance(option, (Null, Boolean))
        except UnsupportedGuideError:
            options.append(option)
    if not fitted:
        raise _unsupported(what, shape, at)
    narrowed = OneOf(options)
    narrowed.description = shape.description
    return narrowed


def _bound(shape: Shape, keyword: str, value: Any, at: str) -> Any:
    """The bound as a number that JSON can hold; for whole numbers the next whole one inwards."""
    value = float(value) if not isinstance(value, (int, float)) else value  # a Decimal
    if not math.isfinite(value):
        raise InvalidGenerationSchemaError(f"{at}: {keyword} is {value}", hint="use a finite number")
    if isinstance(shape, Number) and shape.whole and keyword != "multipleOf":
        inwards = {"minimum": math.ceil, "maximum": math.floor}
        if keyword in inwards:
            return inwards[keyword](value)
    return value


def _joined(limits: dict[str, Any], keyword: str, value: Any) -> dict[str, Any]:
    if keyword in limits:
        value = max(limits[keyword], value) if keyword in _LOWER else min(limits[keyword], value)
    return {**limits, keyword: value}


def _check_limits(shape: Any, at: str) -> None:
    limits = shape.limits
    low = max([limits[word] for word in _LOWER if word in limits], default=-math.inf)
    high = min([limits[word] for word in _UPPER if word in limits], default=math.inf)
    strict = limits.get("exclusiveMinimum") == low or limits.get("exclusiveMaximum") == high
    if low > high or (strict and low == high):
        message = f"{at}: no {shape.name} is at least {low} and at most {high}"
        raise InvalidGenerationSchemaError(message, hint="the lower bound must not be above the upper one")
    if limits.get("multipleOf", 1) <= 0:
        raise InvalidGenerationSchemaError(f"{at}: multipleOf is {limits['multipleOf']}", hint="use a number above 0")


def _chosen(shape: Text | Choice, texts: Sequence[str], at: str) -> Choice:
    if not texts:
        raise InvalidGenerationSchemaError(f"{at}: anyOf has nothing to choose from", hint="give at least one text")
    if isinstance(shape, Choice):
        kept = {key: pair for key, pair in shape.choices.items() if pair[0] in texts}
        chosen = Choice(shape.name, kept, shape.description)
    else:
        pairs = [(text, shape.make(text) if shape.make else text) for text in texts]
        chosen = Choice.of(shape.name, pairs)
        for pattern in shape.full:
            chosen = _matching(chosen, pattern)
    if not chosen.choices:
        raise InvalidGenerationSchemaError(
            f"{at}: its guides leave no text to choose", hint="they contradict each other"
        )
    return chosen


def _matched(shape: Text | Choice, pattern: str, at: str) -> Shape:
    _check_pattern(pattern, at)
    if isinstance(shape, Choice):
        chosen = _matching(shape, pattern)
        if not chosen.choices:
            raise InvalidGenerationSchemaError(
                f"{at}: none of its choices matches {pattern!r}", hint="change one of them"
            )
        return chosen
    narrowed = copy.copy(shape)
    narrowed.full = (*shape.full, pattern)
    return narrowed


def _matching(shape: Choice, pattern: str) -> Choice:
    try:
        kept = {key: pair for key, pair in shape.choices.items() if re.fullmatch(pattern, str(pair[0]))}
    except re.error:  # of the grammar's dialect and not of Python's
        return shape
    return Choice(shape.name, kept, shape.description)


def _check_pattern(pattern: str, at: str) -> None:
    wrong = why_not({"type": "string", "pattern": pattern})
    if wrong:
        hint = "use a regular expression without look-around, back-references and word boundaries"
        raise InvalidGenerationSchemaError(f"{at}: its pattern cannot be enforced: {wrong}", hint=hint)


def _unsupported(what: str, shape: Shape, at: str) -> UnsupportedGuideError:
    if isinstance(shape, ListOf):
        hint = "lists take count, min_items, max_items, and element with a guide for their items"
    elif isinstance(shape, Number):
        hint = "numbers take minimum, maximum and range"
    elif isinstance(shape, Text):
        hint = "texts take anyOf, constant and regex"
    else:
        hint = "leave the guide out"
    return UnsupportedGuideError(f"{at}: the guide {what} says nothing about {shape.name}", hint=hint)
