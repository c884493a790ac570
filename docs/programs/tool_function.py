"""A Python function as a tool: name, description and schema come from its signature and docstring."""

from typing import Literal

import orchard
from orchard import fm


def price(item: Literal["tea", "cake"], pieces: int = 1) -> dict[str, float]:
    """What something costs.

    Args:
        item: what to buy
        pieces: how many of it
    """
    each = {"tea": 2.5, "cake": 4.0}[item]
    return {"total": each * max(0, min(pieces, 100))}


session = orchard.Session("You work at a till.", tools=[price])
options = fm.GenerationOptions(tool_calling_mode="required", maximum_response_tokens=60)
answer = session.respond("What does a cup of tea cost?", options=options)
for entry in answer.transcript_entries:
    print(type(entry).__name__, "|", entry.text[:70])
assert any(type(entry).__name__ == "ToolCalls" for entry in answer.transcript_entries)
