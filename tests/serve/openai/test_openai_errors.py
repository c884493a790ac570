"""What OpenAI's own package is told when a request to `/v1/chat/completions` is wrong."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.openai.asking_chat import ASKED, MODEL, TOOLS, asked

pytestmark = [pytest.mark.loopback, pytest.mark.real]


@pytest.mark.parametrize(
    ("settings", "param", "code"),
    [
        ({"temperature": 2.5}, "temperature", "invalid_request"),
        ({"top_p": -1}, "top_p", "invalid_request"),
        ({"n": 0}, "n", "invalid_request"),
        ({"n": 17}, "n", "invalid_request"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_request"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_request"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_request"),
        ({"stop": ["x"] * 17}, "stop", "invalid_request"),
        ({"stop": ""}, "stop", "invalid_request"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "invalid_request"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "invalid_request"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "invalid_request"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "invalid_request"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "unsupported_parameter"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"reasoning_effort": "wild"}, "reasoning_effort", "invalid_request"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, settings: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, **settings)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error" and param.split(".")[0] in caught.value.message


def test_a_picture_is_refused_by_its_place(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url") as caught:
        asked(client, messages=[{"role": "user", "content": parts}])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages.0.content.1")


def test_a_model_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2") as caught:
        asked(client, model="gpt-9")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_input_that_is_too_long_is_told_both_counts(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"9,0\d\d tokens.*8,192") as caught:
        asked(client, messages=[{"role": "user", "content": "word " * 9000}], stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_fields_that_nobody_knows_are_named_in_a_header(client: openai.OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 1, "temperature": 0}
    settings |= {"extra_body": {"frobnicate": 1}, "verbosity": "low", "reasoning_effort": "low", "store": True}
    whole = client.chat.completions.with_raw_response.create(**settings)
    assert whole.headers["x-orchard-ignored"] == "frobnicate, store, verbosity, reasoning_effort"
    with client.chat.completions.with_streaming_response.create(**settings, stream=True) as stream:
        assert stream.headers["x-orchard-ignored"] == whole.headers["x-orchard-ignored"]
    harmless = {"metadata": {"a": "b"}, "user": "me", "safety_identifier": "me", "service_tier": "auto", "store": False}
    settings |= harmless | {
        "extra_body": {},
        "verbosity": "medium",
        "reasoning_effort": "none",
        "prompt_cache_key": "x",
    }
    assert "x-orchard-ignored" not in client.chat.completions.with_raw_response.create(**settings).headers
