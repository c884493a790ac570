"""How much a model that can think is to think: what its template is told, and how many tokens its thoughts may take.

Templates have no common word for it, so they are told in all the ways that are in use, and take what they know:
`enable_thinking` (Qwen 3), `thinking` (DeepSeek, Granite), `reasoning_effort` (gpt-oss). What a template does not do, a budget
does: thoughts are closed when they are spent (`orchard.generate.budget`).
"""

from __future__ import annotations

from typing import Any

from orchard.generate.budget import Budget
from orchard.session.executors.local_text import CLOSE, OPEN
from orchard.text.tokenizer import Tokenizer

TOKENS = {"none": 0, "light": 256, "moderate": 1024}
"""What thoughts may take; other levels have no bound but that of the answer."""
_EFFORTS = {"none": "none", "light": "low", "moderate": "medium", "deep": "high"}


def template_variables(level: str | None) -> dict[str, Any]:
    """Nothing where nobody asked: the template's own defaults hold."""
    if level is None:
        return {}
    thinks = level != "none"
    return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": _EFFORTS.get(level, level)}


def thinking_rules(tokenizer: Tokenizer, level: str | None, *, opened: bool) -> tuple[Budget, ...]:
    """`opened`: the prompt ends inside thoughts."""
    if level not in TOKENS:
        return ()
    return (Budget(TOKENS[level], None if opened else _mark(tokenizer, OPEN), _mark(tokenizer, CLOSE)),)


def _mark(tokenizer: Tokenizer, text: str) -> list[int]:
    """A mark is one token of its own in most models that think, and spelled out in the others."""
    own = next((id for id, token in tokenizer.added_tokens.items() if str(token.content) == text), None)
    return [own] if own is not None else tokenizer.encode_piece(text, first=False)
