"""Bodies and events of Anthropic's protocol, without a server: whatever comes is understood, or refused in words."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.serve.anthropic.messages_body import MessagesBody
from orchard.serve.anthropic.messages_stream import Writer, folded, stop_in
from orchard.serve.anthropic.messages_turn import turn_of
from orchard.serve.bodies import parsed
from orchard.serve.errors import ApiError
from orchard.serve.settings import Limits
from orchard.session.turn import Call, Done, Reasoning, Text, Turn
from tests.serve.anthropic.asking import HELLO
from tests.serve.damage import damaged

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.text(min_size=1, max_size=12)
TEXT_BLOCKS = st.fixed_dictionaries({"type": st.just("text"), "text": WORDS})
BLOCKS = TEXT_BLOCKS | st.fixed_dictionaries(
    {"type": st.sampled_from(["tool_use", "tool_result", "thinking", "image", "redacted_thinking"])},
    optional={
        "text": WORDS,
        "id": st.sampled_from(["a", "b", ""]),
        "name": WORDS,
        "input": st.dictionaries(WORDS, JSON, max_size=2),
        "tool_use_id": st.sampled_from(["a", "b", "c"]),
        "content": WORDS | st.lists(TEXT_BLOCKS, max_size=2),
        "is_error": st.booleans(),
    },
)
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALLED = [
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
]
SAID = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": WORDS | st.lists(BLOCKS, min_size=1, max_size=3),
    }
)
TALKS = st.lists(SAID, max_size=3).map(lambda said: [*HELLO, *said]) | st.lists(SAID, max_size=1).map(
    lambda said: [*HELLO, *CALLED, *said]
)
TOOLS = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "required"]), "input_schema": st.just({"type": "object"}) | JSON},
    optional={"description": WORDS, "type": st.just("custom")},
)
FORMATS = st.fixed_dictionaries({"type": st.just("json_schema"), "schema": JSON})
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.integers(1, 99), "messages": TALKS},
    optional={
        "system": WORDS | st.lists(TEXT_BLOCKS, max_size=2),
        "tools": st.lists(TOOLS, max_size=2, unique_by=lambda tool: tool["name"]),
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"])},
            optional={"name": st.sampled_from(["a", "required"])},
        ),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 9),
        "stop_sequences": st.lists(WORDS, max_size=3),
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(["enabled", "adaptive", "disabled"]), "budget_tokens": st.integers(1, 9999)}
        ),
        "output_config": st.fixed_dictionaries({}, optional={"effort": st.just("low"), "format": FORMATS}),
        "metadata": st.fixed_dictionaries({"user_id": WORDS}),
    },
)


@settings(max_examples=300)
@given(BODIES, st.booleans(), st.data())
def test_any_body_is_a_turn_or_an_api_error(body: dict[str, Any], reasons: bool, data: st.DataObject) -> None:
    """A body as it should be, of which some place may hold anything."""
    body = damaged(body, data, JSON)
    try:
        made = turn_of(parsed(json.dumps(body).encode(), MessagesBody), Limits(), reasons=reasons).turn
    except ApiError as error:
        seen("refused")
        assert error.status == 400 and error.message
        return
    seen("understood")
    assert made.messages and made.max_tokens == body["max_tokens"]
    assert made.tool_mode in ("allowed", "required", "disallowed")


EVENTS = st.lists(
    st.text(max_size=6).map(Text)
    | st.text(min_size=1, max_size=6).map(Reasoning)
    | st.just(Call("call_1", "f", '{"a":1}')),
    max_size=8,
)


@given(EVENTS, st.booleans())
def test_blocks_hold_what_was_said(events: list[Any], shown: bool) -> None:
    writer = Writer("m", Turn(()), thoughts=shown)
    wire = writer.start(1)
    for event in events:
        wire += writer.take(event)
    wire += writer.end(Done("stop"), None)
    starts = [event["index"] for event in wire if event["type"] == "content_block_start"]
    assert starts == list(range(len(starts))) == [e["index"] for e in wire if e["type"] == "content_block_stop"]
    content = folded(wire)["content"]
    said = "".join(block["text"] for block in content if block["type"] == "text")
    thought = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    assert "".join(said.split()) == "".join("".join(e.delta for e in events if isinstance(e, Text)).split())
    assert thought == ("".join(e.delta for e in events if isinstance(e, Reasoning)) if shown else "")
    assert sum(block["type"] == "tool_use" for block in content) == sum(isinstance(e, Call) for e in events)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_which_stop_string_it_was(text: str, stops: list[str]) -> None:
    """As the engine finds it: letter by letter, the first to be complete."""
    expected = None
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            expected = max(complete, key=len)
            break
    assert stop_in(text, stops) == expected
