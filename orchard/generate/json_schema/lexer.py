"""Questions that only the lexer can answer: whether an expression matches a text, and whether it matches anything.

Asked with a vocabulary of bytes, which takes a millisecond to make.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class TooComplex(ValueError):
    """Expressions that the lexer gives up on."""


@lru_cache(maxsize=4096)
def matches(expression: str, text: str) -> bool:
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_vocabulary(), f"start: LEXEME\nLEXEME: /{expression}/\n", log_level=0, limits=limits())
    spelled = list(text.encode())
    found = matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting()
    if matcher.is_error():
        raise TooComplex(matcher.get_error())
    return found


@lru_cache(maxsize=4096)
def is_empty(definition: str) -> bool:
    """Whether a lexeme of this definition matches nothing."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_vocabulary(), f"start: LEXEME\nLEXEME: {definition}\n", log_level=0, limits=limits())
    if matcher.is_error():
        raise TooComplex(matcher.get_error())
    matcher.compute_bitmask()
    return matcher.is_error()


@lru_cache(maxsize=1)
def _byte_vocabulary() -> Any:
    """A vocabulary of the 256 bytes: enough to ask what an expression matches."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte", slices=[])


@lru_cache(maxsize=1)
def limits() -> Any:
    """How much work a grammar may make: several times what llguidance allows by itself, still well under a second a step."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=5_000_000, step_lexer_fuel=2_000_000, verbose_errors=False)
