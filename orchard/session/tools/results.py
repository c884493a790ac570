"""What a tool answers, as text for a model. The value itself stays the caller's."""

from __future__ import annotations

import json
from typing import Any

from orchard.core.errors import OrchardError


def text_of(value: Any) -> str:
    """A text as it is; what JSON can hold as JSON; anything else as Python prints it."""
    if isinstance(value, str):
        return str(value)
    from orchard.session.schema.content import plain_json

    try:
        text = json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (OrchardError, TypeError, ValueError, RecursionError):
        text = str(value)
    return text


def error_text(error: BaseException) -> str:
    """What the model is told when a tool fails, in the words of the SDK."""
    return f"Tool error: {str(error) or type(error).__name__}"
