"""Bodies of OpenAI's protocol become turns, or an error that says what to change; never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.serve.bodies import ignored, parsed
from orchard.serve.errors import ApiError
from orchard.serve.openai.chat_body import ChatBody, chat_of
from orchard.serve.openai.completions_body import CompletionBody, completions_of
from orchard.serve.openai.fields import noted
from orchard.serve.settings import Limits
from orchard.session.turn import Constraint, Turn

LIMITS = Limits()
ASKED = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


def turns(limits: Limits = LIMITS, **fields: Any) -> tuple[Turn, ...]:
    return chat_of(parsed(json.dumps({"messages": ASKED} | fields).encode(), ChatBody), limits).turns


def turn(**fields: Any) -> Turn:
    return turns(**fields)[0]


def refused(limits: Limits = LIMITS, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        turns(limits, **fields)
    assert caught.value.status == 400 and caught.value.message
    return caught.value


# What nobody can be sure of in advance ------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.integers(-200, 200), st.floats(), st.booleans())
leaves = st.one_of(
    st.none(), numbers, st.text(max_size=20), st.sampled_from(["auto", "none", "required", "function", "text"])
)
words = st.sampled_from(
    [
        "type",
        "function",
        "name",
        "parameters",
        "properties",
        "enum",
        "required",
        "description",
        "items",
        "anyOf",
        "$ref",
        "$defs",
        "role",
        "content",
        "text",
        "mode",
        "tools",
        "allowed_tools",
        "json_schema",
        "schema",
        "strict",
        "json",
        "regex",
        "choice",
        "grammar",
        "arguments",
        "id",
    ]
)
values = st.recursive(
    leaves,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(words | st.text(max_size=4), below, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "function", "developer"]) | values},
        optional={
            "content": st.text(max_size=10)
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}))
            | values,
            "name": values,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"id": st.text(), "type": st.just("function")},
                    optional={"function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text() | values})},
                ),
                max_size=2,
            )
            | values,
            "tool_call_id": st.text() | values,
            "function_call": values,
        },
    ),
    max_size=4,
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.text(max_size=5) | st.sampled_from(["a", "b", "required"])}, optional={"parameters": values}
            )
        },
    ),
    max_size=3,
)
known = dict.fromkeys({**ChatBody.model_fields, **CompletionBody.model_fields}, values) | {
    "messages": messages | values,
    "tools": tools | values,
    "n": st.integers(1, 20) | values,
    "prompt": st.text()
    | st.lists(st.text())
    | st.lists(st.integers(0, 9))
    | st.lists(st.lists(st.integers(0, 9)))
    | values,
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["json_schema", "json_object", "text"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": values}), "schema": values},
    )
    | values,
}


def bodies(first: str) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields besides the one that must be there: most bodies are wrong in one place or none."""
    others = sorted(known.keys() - {first})
    names = st.lists(st.sampled_from(others), max_size=3, unique=True)
    more = names.flatmap(lambda chosen: st.fixed_dictionaries({name: known[name] for name in chosen}))
    usual = st.just(ASKED) if first == "messages" else st.just("Hello")
    return st.builds(lambda given, rest: {first: given} | rest, usual | known[first], more)


@given(bodies("messages"))
def test_a_chat_becomes_turns_or_an_error(body: dict[str, Any]) -> None:
    try:
        read = parsed(json.dumps(body).encode(), ChatBody)
        found = chat_of(read, LIMITS, reasons=True)
    except ApiError as error:
        assert 400 <= error.status < 500 and error.message
        return
    assert 1 <= len(found.turns) <= LIMITS.choices and found.turns[0].messages
    header = noted(read, found.ignored)
    assert all(value.isascii() and value.isprintable() for value in header.values())


@given(bodies("prompt"))
def test_a_prompt_becomes_completions_or_an_error(body: dict[str, Any]) -> None:
    try:
        found = completions_of(parsed(json.dumps(body).encode(), CompletionBody), LIMITS)
    except ApiError as error:
        assert 400 <= error.status < 500 and error.message
        return
    assert 1 <= len(found) <= max(LIMITS.choices, LIMITS.prompts) and all(job.prompt for job in found)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_an_error(data: bytes) -> None:
    try:
        parsed(data, ChatBody)
    except ApiError as error:
        assert error.status == 400


# Messages -------------------------------------------------------------------------------------------------------------------


def test_answers_that_come_back_from_the_package_are_read_without_a_word() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "index": 0,
        "function": {"name": "look", "arguments": '{"a": 1}', "parsed_arguments": {}},
    }
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    history = [*ASKED, dumped | {"tool_calls": [call], "parsed": None, "reasoning_content": "hm"}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen"}]})
    body = parsed(json.dumps({"messages": history}).encode(), ChatBody)
    found = chat_of(body, LIMITS).turns[0].messages
    assert ignored(body) == []
    assert found[1].tool_calls == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    ]
    assert (found[2].content, found[2].name, found[2].tool_call_id) == ("seen", "look", "c1")


def test_a_refusal_is_what_was_said() -> None:
    history = [*ASKED, {"role": "assistant", "content": None, "refusal": "No."}, *ASKED]
    assert turn(messages=history).messages[1].content == "No."


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "thinking"])
def test_parts_that_are_no_text_are_refused_by_name(kind: str) -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert (error.code, error.param) == ("unsupported_parameter", "messages.0.content.0") and kind in error.message


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', "[" * 5000, '{"a": ' * 300 + "1" + "}" * 300],
    ids=["half a character", "never closed", "deep"],
)
def test_arguments_that_would_harm_are_refused_or_kept_as_text(arguments: str) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": arguments}}
    history = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    try:
        found = turn(messages=history).messages[1].tool_calls
    except ApiError as error:
        assert error.param == "messages.1.tool_calls.0.function.arguments"
    else:
        assert found is not None and found[0]["function"]["arguments"] == arguments


def test_too_many_messages() -> None:
    assert refused(Limits(messages=2), messages=ASKED * 3).param == "messages"


# Forms and tools --------------------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_a_form() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
    wanted = Constraint.json_schema(schema)
    assert (
        turn(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).constraint
        == wanted
    )
    assert turn(response_format={"type": "json_object", "schema": schema}).constraint == wanted
    assert turn(guided_json=schema).constraint == turn(guided_json=json.dumps(schema)).constraint == wanted
    assert turn(structured_outputs={"json": schema}).constraint == wanted
    assert turn(response_format={"type": "json_object"}).constraint == Constraint.json_schema({"type": "object"})
    assert turn(response_format={"type": "text"}, guided_regex="a+").constraint == Constraint.regex("a+")
    assert turn(structured_outputs={"grammar": "start: A"}).constraint == Constraint.lark("start: A")


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("where", ["response_format", "guided_json", "tools", "functions"])
def test_schemas_have_limits_everywhere(where: str) -> None:
    def body(schema: Any) -> dict[str, Any]:
        forms: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            "guided_json": schema,
            "tools": [{"type": "function", "function": {"name": "x", "parameters": schema}}],
            "functions": [{"name": "x", "parameters": schema}],
        }
        return {where: forms[where]}

    limits = Limits(schema_bytes=2000, schema_depth=20)
    assert turns(limits, **body(_deep(5)))
    for wrong in (_deep(15), {"type": "object", "description": "x" * 3000}, {"type": "object", "properties": [1]}):
        error = refused(limits, **body(wrong))
        assert error.code == "invalid_schema" and error.param is not None and error.param.startswith(where)


def test_a_regular_expression_has_a_limit_too() -> None:
    assert refused(Limits(schema_bytes=100), guided_regex="a" * 101).code == "invalid_schema"
    assert refused(guided_choice=[]).param == "guided_choice"


def test_a_tool_may_have_the_name_of_a_mode() -> None:
    both = [{"type": "function", "function": FUNCTION | {"name": name}} for name in ("allowed", "other")]
    found = turn(tools=both, tool_choice={"type": "function", "function": {"name": "allowed"}})
    assert [tool.name for tool in found.tools] == ["allowed"] and found.tool_mode == "required"


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        (None, ["look", "leap"], "allowed"),
        ("auto", ["look", "leap"], "allowed"),
        ("none", ["look", "leap"], "disallowed"),
        ("required", ["look", "leap"], "required"),
        ({"type": "function", "function": {"name": "leap"}}, ["leap"], "required"),
    ],
)
def test_which_tools_are_offered(choice: Any, names: list[str], mode: str) -> None:
    both = [{"type": "function", "function": FUNCTION | {"name": name}} for name in ("look", "leap")]
    found = turn(tools=both, tool_choice=choice)
    assert [tool.name for tool in found.tools] == names and found.tool_mode == mode


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"tools": [{"type": "function", "function": FUNCTION}] * 2},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "x"}},
        },
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": {"type": "custom"}},
        {"tools": [{"type": "function", "function": FUNCTION}], "functions": [FUNCTION]},
        {"functions": [FUNCTION], "function_call": "always"},
        {"functions": [FUNCTION], "function_call": {"name": "leap"}},
    ],
)
def test_tools_that_cannot_be_offered(fields: dict[str, Any]) -> None:
    assert refused(**fields).param is not None


def test_a_number_that_json_cannot_write_again() -> None:
    data = b'{"messages":[{"role":"user","content":"x"}],"guided_json":{"maximum":' + b"9" * 5000 + b"}}"
    with pytest.raises(ApiError):
        chat_of(parsed(data, ChatBody), LIMITS)


# Numbers ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "1"},
        {"temperature": -0.1},
        {"n": True},
        {"n": 1.5},
        {"max_tokens": -1},
        {"max_completion_tokens": 0},
        {"seed": 2**63},
        {"stream": "yes"},
        {"top_k": 1.5},
        {"logit_bias": {"1": "x"}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {str(n): 1 for n in range(1025)}},
        {"stop": ["x" * 257]},
        {"logprobs": 3},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
def test_numbers_out_of_range_name_their_field(fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.param is not None and error.param.split(".")[0] == next(iter(fields))


def test_neighbouring_seeds_and_equal_words_for_the_most_tokens() -> None:
    assert [one.seed for one in turns(n=3, seed=-1)] == [-1, 0, 1]
    assert turn(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert [one.seed for one in turns(n=2)] == [None, None]


def test_samplers_that_other_servers_switch_off_with_numbers() -> None:
    assert turn(top_k=-1).sampling.top_k is turn(top_k=0).sampling.top_k is None
    assert turn(top_p=0).sampling.top_k == 1 and turn(temperature=0).sampling.temperature == 0
