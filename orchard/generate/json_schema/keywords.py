"""The keywords of JSON Schema that say something of one kind of value, read into atoms; and which others there are.

Each is checked for its form here: a keyword that is misspelled, or whose value makes no sense, is refused and never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, NoReturn

from orchard.generate.errors import UnsupportedSchema
from orchard.generate.json_schema.formats import FORMATS, NUMBER_FORMATS, expression, format_strings
from orchard.generate.json_schema.lexer import TooComplex
from orchard.generate.json_schema.numbers import MOST_DIGITS, Numbers
from orchard.generate.json_schema.pattern import PatternError
from orchard.generate.json_schema.shapes import Booleans, Nulls, Shape
from orchard.generate.json_schema.strings import Strings

Formats = Literal["assert", "ignore"]
Part = dict[str, Any]

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRINGS = ("minLength", "maxLength", "pattern")
ARRAYS = ("prefixItems", "items", "minItems", "maxItems", "contains", "minContains", "maxContains", "uniqueItems")
OBJECTS: tuple[str, ...] = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)
OBJECTS += ("propertyNames", "x-order")
IN_PLACE: tuple[str, ...] = (
    "type",
    "const",
    "enum",
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
)
IN_PLACE += (
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "format",
)
PLACES = ("$id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "$schema")
NOTES: tuple[str, ...] = (
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
)
NOTES += ("contentEncoding", "contentMediaType", "contentSchema", "discriminator")
"""Say something of a value without limiting it. `discriminator` (OpenAPI) only helps to read a `oneOf` that is there too."""
KNOWN = frozenset((*NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *IN_PLACE, *PLACES, *NOTES))

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
LATEST = "https://json-schema.org/draft/2020-12/schema"
OLDER = tuple(f"http://json-schema.org/draft-0{number}/schema" for number in (6, 7))
BETWEEN = "https://json-schema.org/draft/2019-09/schema"
_NEW = ("prefixItems", "$dynamicRef", "$dynamicAnchor")
_NEWER: tuple[str, ...] = (*_NEW, "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")
_NEWER += ("minContains", "maxContains", "$anchor")


def refuse(keyword: str, pointer: str, why: str, hint: str = "") -> NoReturn:
    raise UnsupportedSchema(keyword, pointer, why, hint=hint)


def check_keywords(part: Part, pointer: str) -> None:
    for keyword in part:
        if keyword not in KNOWN and not keyword.startswith("x-"):
            refuse(keyword, pointer, "no keyword that is known here", "names of your own begin with x-")


def check_draft(root: Any, parts: Mapping[int, str], part: Part, older: str | None) -> None:
    """Older drafts are read where they mean the same as the newest."""
    pointer = parts[id(part)]
    draft = part.get("$schema")
    if draft is not None and part is not root and draft != LATEST:
        refuse("$schema", pointer, "a part of another draft of JSON Schema")
    if older is None:
        return
    for keyword in _NEW if older == BETWEEN else _NEWER:
        if keyword in part:
            refuse(keyword, pointer, f"not in the draft that $schema names, {older}")
    if older in OLDER and "$ref" in part and len(part.keys() - {*NOTES, *PLACES}) > 1:
        refuse("$ref", pointer, "this draft ignores what stands beside it", "remove what stands beside it, or $schema")


def draft_of(root: Any) -> str | None:
    """The draft of a schema where it is an older one."""
    named = root.get("$schema") if isinstance(root, dict) else None
    if named is None or named == LATEST:
        return None
    plain = named.rstrip("#") if isinstance(named, str) else named
    if plain == LATEST:
        return None
    if plain not in (*OLDER, BETWEEN):
        refuse("$schema", "", f"{named!r} is not a draft that is known here", f"use {LATEST}")
    return str(plain)


# Values of keywords -------------------------------------------------------------------------------------------------


def exact(keyword: str, pointer: str, value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        refuse(keyword, pointer, "not a number")
    if (isinstance(value, float) and not math.isfinite(value)) or abs(Decimal(str(value)).adjusted()) > MOST_DIGITS:
        refuse(keyword, pointer, "a number with too many digits")
    return Fraction(Decimal(str(value)) if isinstance(value, float) else value)


def count(part: Part, keyword: str, pointer: str) -> int | None:
    if keyword not in part:
        return None
    value = exact(keyword, pointer, part[keyword])
    if value < 0 or value.denominator != 1:
        refuse(keyword, pointer, "not a whole number from 0")
    if value > 100_000:
        refuse(keyword, pointer, "larger than 100,000")
    return int(value)


def text(keyword: str, pointer: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(keyword, pointer, "not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(keyword, pointer, "a text that is not valid Unicode")
    return value


def texts(keyword: str, pointer: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        refuse(keyword, pointer, "not a list of texts")
    return tuple(dict.fromkeys(text(keyword, pointer, one) for one in value))


def table(part: Part, keyword: str, pointer: str) -> dict[str, Any]:
    found = part.get(keyword, {})
    if not isinstance(found, dict):
        refuse(keyword, pointer, "not an object")
    for name in found:
        text(keyword, pointer, name)
    return found


def types_of(part: Part, pointer: str) -> frozenset[str]:
    given = part.get("type", list(TYPES))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in TYPES for name in names):
        refuse("type", pointer, f"not a type or a list of types: {given!r}", f"types are {', '.join(TYPES)}")
    return frozenset(names)


def pattern_expression(keyword: str, pointer: str, pattern: Any) -> str:
    try:
        return expression(text(keyword, pointer, pattern))
    except PatternError as error:
        refuse(keyword, pointer, f"the pattern {pattern!r} cannot be used: {error}")


# Atoms --------------------------------------------------------------------------------------------------------------


def plain_atoms(types: frozenset[str]) -> list[Shape]:
    found = [Shape((Nulls(),))] if "null" in types else []
    return found + ([Shape((Booleans(),))] if "boolean" in types else [])


def numbers(part: Part, pointer: str, types: frozenset[str], formats: Formats) -> Shape:
    found = Numbers("any" if "number" in types else "whole")
    for keyword in NUMBERS:
        if keyword not in part:
            continue
        value = exact(keyword, pointer, part[keyword])
        if keyword == "multipleOf" and value <= 0:
            refuse(keyword, pointer, "not a number above 0")
        more = {
            "minimum": Numbers(low=value),
            "maximum": Numbers(high=value),
            "exclusiveMinimum": Numbers(low=value, low_open=True),
            "exclusiveMaximum": Numbers(high=value, high_open=True),
            "multipleOf": Numbers(step=value),
        }
        met = found.meet(more[keyword])
        if met is None:
            return Shape()
        found = met
    limits = NUMBER_FORMATS.get(part.get("format", "")) if formats == "assert" and "string" not in types else None
    if limits is not None:
        met = found.meet(Numbers("whole", Fraction(limits[0]), Fraction(limits[1])))
        return Shape((met,)) if met is not None else Shape()
    return Shape((found.settled(),))


def strings(part: Part, pointer: str, formats: Formats) -> Shape:
    low, high = count(part, "minLength", pointer) or 0, count(part, "maxLength", pointer)
    has = (pattern_expression("pattern", pointer, part["pattern"]),) if "pattern" in part else ()
    found: Strings | None = Strings(low=low, high=high, has=has)
    try:
        if found is not None and found.never():
            return Shape()
        if found is not None and formats == "assert" and part.get("format") in FORMATS:
            found = found.meet(format_strings(part["format"]))
    except TooComplex:
        refuse("pattern" if "pattern" in part else "format", pointer, "too complex to be followed")
    return Shape((found,)) if found is not None else Shape()


def check_format(part: Part, pointer: str, types: frozenset[str], formats: Formats) -> None:
    if "format" not in part:
        return
    name = text("format", pointer, part["format"])
    if formats == "ignore" or ("string" not in types and not types & {"number", "integer"}):
        return
    allowed = FORMATS if "string" in types else frozenset(NUMBER_FORMATS) | FORMATS
    if name not in allowed:
        hint = f"formats are {', '.join(sorted(FORMATS))}; a pattern can say others"
        refuse("format", pointer, f"the format {name!r} cannot be held to", hint)
