"""`/tokenize` and `/detokenize`: what a model makes of a text, there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.serve.serving import Serving

pytestmark = pytest.mark.loopback
TEXTS = ["Hello, world!", "  two  spaces\n", "Grüße, 日本 🙂", "<|im_start|>user", "1234567890", ""]


def post(serving: Serving, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{serving.url}/{path}", json={"model": "smollm2"} | body)


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(server: Serving, text: str) -> None:
    found = post(server, "tokenize", text=text).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] > 1000
    back = post(server, "detokenize", tokens=found["tokens"]).json()
    assert back["text"] == back["content"] == back["prompt"] == text
    for name in ("content", "prompt"):  # as llama-server and vLLM call it
        assert post(server, "tokenize", **{name: text}).json()["tokens"] == found["tokens"]


@pytest.mark.real
def test_spelled(server: Serving) -> None:
    found = post(server, "tokenize", text="Hello world 🪿", spelled=True).json()
    assert len(found["spelled"]) == found["count"] and found["spelled"][:2] == ["Hello", " world"]
    assert any(piece.startswith("\\x") for piece in found["spelled"])  # bytes of a character that is cut
    assert "spelled" not in post(server, "tokenize", text="Hello").json()


@pytest.mark.real
def test_conversations_are_counted_as_they_are_read(server: Serving) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {}}}]
    plain, told = (post(server, "tokenize", messages=said, **more).json() for more in ({}, {"tools": tools}))
    read = post(server, "detokenize", tokens=plain["tokens"]).json()["text"]
    assert read.count("<|im_start|>") == 3 and "Be brief." in read and read.rstrip().endswith("assistant")
    assert told["count"] > plain["count"]
    body = {"model": "smollm2", "messages": said, "max_tokens": 1, "temperature": 0}
    answer = httpx2.post(f"{server.base_url}/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == plain["count"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("tokenize", {}, "text and messages"),
        ("tokenize", {"text": "a", "prompt": "b"}, "text and messages"),
        ("tokenize", {"text": "a", "messages": [{"role": "user", "content": "b"}]}, "text and messages"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"text": 3}, "text"),
        ("tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "-1"),
        ("detokenize", {"tokens": [10**6]}, "1000000"),
        ("detokenize", {"tokens": [10**40]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("detokenize", {"tokens": [True]}, "tokens.0"),
    ],
)
def test_wrong_requests_are_told_what_to_change(server: Serving, path: str, body: dict[str, Any], words: str) -> None:
    answer = post(server, path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["code"]


@pytest.mark.real
def test_unknown_fields_are_named(server: Serving) -> None:
    assert post(server, "tokenize", text="a", add_special=True).headers["x-orchard-ignored"] == "add_special"
    assert post(server, "detokenize", tokens=[], colour=1).headers["x-orchard-ignored"] == "colour"


def test_models_without_tokens(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server([])
    for path, body in (("tokenize", {"text": "a"}), ("detokenize", {"tokens": [1]})):
        answer = post(serving, path, model="scripted", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_kind_of_model")
    assert post(serving, "tokenize", model="nope", text="a").status_code == 404
