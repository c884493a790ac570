"""Bodies of `/v1/responses`, without a server: whatever comes is understood, or refused in words."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.serve.bodies import parsed
from orchard.serve.errors import ApiError
from orchard.serve.openai.responses_body import ResponsesBody
from orchard.serve.openai.responses_turn import turn_of
from orchard.serve.settings import Limits
from tests.serve.damage import damaged

TEXTS = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.text(min_size=1, max_size=12)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": WORDS})
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": WORDS | st.lists(PARTS, max_size=2),
    }
)
CALLS = st.fixed_dictionaries(
    {"type": st.just("function_call"), "call_id": st.just("a"), "name": WORDS, "arguments": TEXTS}
)
RESULTS = st.fixed_dictionaries(
    {"type": st.just("function_call_output"), "call_id": st.sampled_from(["a", "b"]), "output": TEXTS}
)
ITEMS = st.lists(MESSAGES | CALLS | RESULTS | st.just({"type": "reasoning", "summary": []}), max_size=4)
TOOLS = st.fixed_dictionaries(
    {"type": st.just("function"), "name": st.sampled_from(["a", "b"]), "parameters": st.just({"type": "object"}) | JSON}
)
BODIES = st.fixed_dictionaries(
    {"input": WORDS | ITEMS.map(lambda items: [{"role": "user", "content": "Hello"}, *items])},
    optional={
        "model": TEXTS,
        "instructions": TEXTS,
        "tools": st.lists(TOOLS, max_size=2, unique_by=lambda tool: tool["name"]),
        "tool_choice": st.sampled_from(["auto", "required", "none"])
        | st.fixed_dictionaries({"type": st.sampled_from(["function", "allowed_tools"]), "name": st.just("a")}),
        "text": st.fixed_dictionaries(
            {"format": st.fixed_dictionaries({"type": st.just("json_schema"), "schema": JSON})}
        ),
        "max_output_tokens": st.integers(1, 99),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_logprobs": st.integers(0, 20),
        "include": st.lists(TEXTS, max_size=2),
        "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["low", "none"])}),
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
    },
)


@settings(max_examples=300)
@given(BODIES, st.booleans(), st.data())
def test_any_body_is_a_turn_or_an_api_error(body: dict[str, Any], reasons: bool, data: st.DataObject) -> None:
    """A body as it should be, of which some place may hold anything."""
    body = damaged(body, data, JSON)
    try:
        made = turn_of(parsed(json.dumps(body).encode(), ResponsesBody), Limits(), reasons=reasons).turn
    except ApiError as error:
        seen("refused")
        assert error.status == 400 and error.message
        return
    seen("understood")
    assert made.messages and made.tool_mode in ("allowed", "required", "disallowed")
