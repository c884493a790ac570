"""What an answer must match: a JSON Schema, a regular expression, one of some texts, or a grammar.

A constraint is a plain value that can be compared, stored and sent to another machine. `orchard.generate.grammar` makes of
it what rules out tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen

Kind = Literal["json_schema", "regex", "choices", "lark"]


@frozen
class Constraint:
    """Make one with the class methods. `source` is the schema or the choices as JSON, or the pattern or grammar itself."""

    kind: Kind
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Constraint:
        """JSON without spaces that matches the schema; properties come in the order in which the schema lists them."""
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"this schema is no JSON: {error}", hint="use dicts, lists, texts and numbers") from error
        except RecursionError as error:
            raise UsageError("this schema is nested too deeply", hint="flatten it, or use $defs") from error

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """The whole answer matches the pattern."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Constraint:
        """The answer is one of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise UsageError("choices are not a list of texts", hint='give texts to choose from, such as ["yes", "no"]')
        return cls("choices", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A grammar in the Lark dialect of llguidance, from its rule `start`."""
        return cls("lark", grammar)
