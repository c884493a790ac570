"""What is written for an answer, without a server: whatever a model says, a client reads the same."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchard.serve.bodies import parsed
from orchard.serve.openai.chat_body import ChatBody
from orchard.serve.openai.chat_stream import ChatChunks
from orchard.serve.openai.completions_body import CompletionBody
from orchard.serve.openai.completions_stream import TextChunks
from orchard.serve.openai.logprobs import ChatLogprobs, TextLogprobs, joined, legacy_name, shown
from orchard.serve.service import Ask
from orchard.session.completion import Completion
from orchard.session.turn import Call, Done, Event, Message, Reasoning, Text, TokenLogprob, Turn, Usage

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
events = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(
            st.builds(Text, words),
            st.builds(Reasoning, words),
            st.builds(Call, words, words, words),
        ),
    ),
    max_size=12,
)
DONE: list[tuple[int, Event]] = [(0, Done("stop", Usage(7, 3, 2, 1))), (1, Done("length", Usage(7, 0, 5)))]


def _ask(job: Any) -> Ask:
    return Ask('a "model"', (job, job), "me", 60.0)


def _read(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@given(events, st.booleans())
def test_a_chat_is_read_as_it_was_said(said: list[tuple[int, Event]], usage: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": usage}}
    chunks = ChatChunks(parsed(json.dumps(body).encode(), ChatBody), _ask(Turn((Message("user", "x"),))), None)
    found = _read(chunks.begin() + chunks.of(said) + chunks.of(DONE) + chunks.end())
    texts, thoughts, calls, ends = ["", ""], ["", ""], [[], []], [None, None]  # type: ignore[var-annotated]
    for chunk in found:
        assert chunk["model"] == 'a "model"' and chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            place, delta = choice["index"], choice["delta"]
            texts[place] += delta.get("content") or ""
            thoughts[place] += delta.get("reasoning_content") or ""
            calls[place] += [tuple(call["function"].values()) for call in delta.get("tool_calls") or ()]
            ends[place] = choice["finish_reason"]
    for place in (0, 1):
        own = [event for index, event in said if index == place]
        assert texts[place] == "".join(event.delta for event in own if isinstance(event, Text))
        assert thoughts[place] == "".join(event.delta for event in own if isinstance(event, Reasoning))
        assert calls[place] == [(event.name, event.arguments) for event in own if isinstance(event, Call)]
    assert ends == ["stop", "length"] and ("usage" in found[-1]) == usage
    if usage:
        used = found[-1]["usage"]
        assert found[-1]["choices"] == [] and (used["prompt_tokens"], used["completion_tokens"]) == (7, 7)
        assert used["completion_tokens_details"]["reasoning_tokens"] == 1


@given(st.lists(st.tuples(st.integers(0, 1), st.builds(Text, words)), max_size=8))
def test_a_text_is_read_as_it_was_said(said: list[tuple[int, Event]]) -> None:
    body = parsed(b'{"prompt":["a","b"],"stream":true,"stream_options":{"include_usage":true}}', CompletionBody)
    chunks = TextChunks(body, _ask(Completion("a")), None, 1)
    found = _read(chunks.of(said) + chunks.of(DONE) + chunks.end())
    texts = ["", ""]
    for chunk in found[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["".join(event.delta for at, event in said if at == place) for place in (0, 1)]  # type: ignore[union-attr]
    assert found[-1]["usage"]["prompt_tokens"] == 14


def _cut(text: str, cuts: list[int]) -> list[bytes]:
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(words.filter(bool), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_tokens_that_are_half_characters_have_their_place(text: str, cuts: list[int], stops: bool) -> None:
    tokens = _cut(text, cuts)
    marks = TextLogprobs(lambda ids: [tokens[id] for id in ids], stops=stops)
    ids = tuple(range(len(tokens)))
    event = Text(text, ids, tuple(TokenLogprob(id, -1.0, ((id, -1.0),)) for id in ids))
    shape = marks.shape(event)
    assert shape["tokens"] == [legacy_name(token) for token in tokens] and marks.last(Done("stop")) is None
    for place, token in zip(shape["text_offset"], tokens, strict=True):
        assert legacy_name(token).startswith("bytes:") or text[place:].startswith(token.decode())
    entries = ChatLogprobs(lambda ids: [tokens[id] for id in ids], stops=stops).entries(event)
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()


def test_tokens_held_for_a_stop_text_are_told_when_their_text_is() -> None:
    spelled = [b"one", b" E", b"N", b"x", b" E", b"ND"]

    def told(*events: Text | Done) -> list[str]:
        marks = TextLogprobs(lambda ids: [spelled[id] for id in ids], stops=True)
        shapes = [marks.last(event) if isinstance(event, Done) else marks.shape(event) for event in events]
        return list(joined([shape for shape in shapes if shape])["tokens"])

    def text(delta: str, id: int) -> Text:
        return Text(delta, (id,), (TokenLogprob(id, -1.0),))

    begun = (text("one", 0), text(" ", 1), text("", 2), text("ENx", 3), text(" ", 4), text("", 5))
    assert told(*begun, Done("stop")) == ["one", " E", "N", "x", " E"]
    assert told(*begun[:-1], Text("E"), Done("length")) == ["one", " E", "N", "x", " E"]
    ended = (*begun[:4], Text("", (), (TokenLogprob(0, -2.0),)), Done("stop"))
    assert told(*ended) == ["one", " E", "N", "x", "one"]


def test_bytes_that_are_no_text_are_spelled_out() -> None:
    assert shown("é".encode()) == "é" and shown(b"\xf0\x9f") == "\\xf0\\x9f"
    assert legacy_name(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
