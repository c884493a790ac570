"""Answers of `/v1/chat/completions` that are held to a form, read by OpenAI's own package."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serve.openai.asking_chat import ASKED, MODEL, asked, said, streamed

pytestmark = [pytest.mark.loopback, pytest.mark.real]


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["happy", "sad"]


def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ada is 36."}],
        response_format=Person,
        max_tokens=60,
        temperature=0,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and person.mood in ("happy", "sad")


def test_a_streamed_answer_is_parsed_too(client: openai.OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 0}
    with client.chat.completions.stream(**settings, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_arguments_of_a_call_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Person, name="remember", description="Remember a person")
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASKED, tools=[tool], tool_choice="required", max_tokens=80, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Person)


def test_a_schema_holds_in_a_stream_too(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": Person.model_json_schema()}}
    Person.model_validate_json(streamed(client, response_format=form, max_tokens=60))


def test_any_json_object(client: openai.OpenAI) -> None:
    assert isinstance(json.loads(said(client, response_format={"type": "json_object"}, max_tokens=64)), dict)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("guided_choice", ["red", "blue"], {"red", "blue"}),
        ("guided_regex", "(yes|no)!", {"yes!", "no!"}),
        ("guided_grammar", 'start: "a" | "b"', {"a", "b"}),
        ("guided_json", {"enum": [1, 2]}, {"1", "2"}),
        ("structured_outputs", {"choice": ["red", "blue"]}, {"red", "blue"}),
    ],
)
def test_forms_of_other_servers(client: openai.OpenAI, field: str, value: Any, wanted: set[str]) -> None:
    assert said(client, extra_body={field: value}) in wanted


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, {"type": "string", "pattern": "("}, {"properties": {"a": {"type": 5}}}]
)
def test_a_schema_that_cannot_be_held_to(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, response_format=form, stream=stream)
        assert caught.value.code == "invalid_schema"
        assert "type" in caught.value.message or "pattern" in caught.value.message
