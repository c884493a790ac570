"""JSON Schema (draft 2020-12) made into a grammar that holds to all of it, or refused by name.

Every value that the grammar lets through is valid, and every valid value has a spelling that it lets through: compact JSON,
properties in the order of the schema (`x-order` where it is there), numbers and texts in one form. A keyword is enforced,
known to be a mere note (`title`, `description`, `x-…`), or refused with `UnsupportedSchema` before the first token; none is
skipped in silence. `format` is held to where it is known.

So that answers come to an end, three things have limits that JSON Schema does not know: parts that are defined by themselves
(trees, and values of which nothing is said) are at most `DEPTH` deep inside each other, or as deep as `x-depth` at the top of
the schema says; numbers have at most 309 digits before the point and 20 after it; `NARROWER` lists formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from orchard.core.errors import UsageError
from orchard.generate.errors import UnsupportedSchema
from orchard.generate.json_schema.keywords import Formats
from orchard.generate.json_schema.lexer import TooComplex
from orchard.generate.json_schema.reader import Reader
from orchard.generate.json_schema.shapes import Unsayable
from orchard.generate.json_schema.writer import Writer

DEPTH = 6
"""How often a part may be inside itself."""
DEEPEST = 64
MOST_CHARACTERS = 4_000_000
"""Of a schema as JSON."""


def normalise(schema: Mapping[str, Any] | bool, *, formats: Formats = "assert") -> dict[str, Any]:
    """What llguidance is given for a schema. Raises `UnsupportedSchema`.

    `formats`: hold to `format` (and refuse formats that are not known), or read it as a note, as the draft does by default.
    """
    try:
        source = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"this schema is no JSON: {error}", hint="use dicts, lists, texts and numbers") from error
    return {"grammars": [{"lark_grammar": schema_grammar(source, formats=formats)}]}


def schema_grammar(source: str, *, formats: Formats = "assert") -> str:
    """The text of the grammar for a schema that is given as JSON. Raises `UnsupportedSchema`."""
    if len(source) > MOST_CHARACTERS:
        raise UnsupportedSchema("schema", "", f"{len(source):,} characters long, more than {MOST_CHARACTERS:,}")
    try:
        schema = json.loads(source, parse_float=Decimal)
        reader = Reader(schema, formats)
        found = Writer(reader.algebra).write(reader.read(), _depth(schema))
    except Unsayable as error:
        raise UnsupportedSchema(
            error.keyword or "schema", error.pointer, f"this cannot be held to: {error.why}"
        ) from None
    except TooComplex:
        raise UnsupportedSchema("schema", "", "its expressions are too complex to be followed") from None
    except RecursionError:
        raise UnsupportedSchema("schema", "", "its parts are too deep inside each other") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"this schema is no JSON: {error}", hint="check its commas and quotes") from error
    if not found:
        raise UnsupportedSchema("schema", "", "no value can be valid", hint="its parts contradict each other")
    return found


def _depth(schema: Any) -> int:
    given = schema.get("x-depth", DEPTH) if isinstance(schema, dict) else DEPTH
    if type(given) is not int or not 1 <= given <= DEEPEST:
        raise UnsupportedSchema("x-depth", "", f"not a whole number from 1 to {DEEPEST}")
    return given
