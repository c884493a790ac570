"""Whether the grammar of a schema's constraint lets a text through: the constraint itself, without a model."""

from __future__ import annotations

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from orchard.generate.json_schema import normalise
from orchard.session.schema import GenerationSchema


@functools.lru_cache(maxsize=1)
def _bytes() -> Any:
    return LLTokenizer("byte")


def compiles(schema: GenerationSchema) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema.constraint().source))


def accepts(schema: GenerationSchema, text: str) -> bool:
    """Whether the text, with nothing after it, is an answer that the constraint allows."""
    grammar = normalise(json.loads(schema.constraint().source))
    matcher = LLMatcher(_bytes(), json.dumps(grammar))
    assert not matcher.get_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
