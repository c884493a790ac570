"""Stop strings and ends through the engine, and the stream object."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate import Engine, Piece, Request
from orchard.text.tokenizer import Tokenizer

Make = Callable[..., Any]


def say(text: str, tokenizer: Tokenizer, scripted: Make, **options: Any) -> Any:
    model = scripted([*tokenizer.encode(text), *tokenizer.eos_ids])
    return Engine(model, tokenizer).answer([Request(ids=(1,), **options)])[0]


@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        ((), "to the band", "stop"),
        (("he b",), "to t", "stop"),  # across token borders: th|e| |b|and
        (("o", "to"), "", "stop"),
        (("nd",), "to the ba", "stop"),
        (("band!",), "to the band", "stop"),  # could have become a stop string, and did not
        ("the", "to ", "stop"),
    ],
)
def test_stop_strings(stop: Any, text: str, finish: str, tokenizer: Tokenizer, scripted: Make) -> None:
    answer = say("to the band", tokenizer, scripted, stop=stop)
    assert (answer.text, answer.finish) == (text, finish)
    assert tokenizer.decode(answer.ids).startswith(text)


def test_held_text_comes_with_the_last_piece(tokenizer: Tokenizer, scripted: Make) -> None:
    answer = say("the band", tokenizer, scripted, stop=("band!",), max_tokens=4)
    assert (answer.text, answer.finish, answer.usage.output) == ("the band", "length", 4)
    half = say("é", tokenizer, scripted, max_tokens=1)
    assert (half.text, half.finish) == ("\ufffd", "length")
    assert say("é", tokenizer, scripted, max_tokens=1, stop="\ufffd").finish == "stop"
    assert say("aé", tokenizer, scripted, stop="é").text == "a"


@given(text=st.text("ab éthe", max_size=30), stops=st.lists(st.text("ab éthe", min_size=1, max_size=4), max_size=3))
def test_any_text_is_cut_at_the_first_stop(text: str, stops: list[str], tokenizer: Tokenizer, scripted: Make) -> None:
    answer = say(text, tokenizer, scripted, stop=tuple(stops))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        whole = text[: ends[0]]
        text = whole[: -max(len(stop) for stop in stops if whole.endswith(stop))]
    assert (answer.text, answer.finish) == (text, "stop")


def test_a_stream(tokenizer: Tokenizer, scripted: Make) -> None:
    stream = Engine(scripted([*tokenizer.encode("the é!"), *tokenizer.eos_ids]), tokenizer).stream(Request(ids=(1,)))
    with pytest.raises(UsageError, match="not complete"):
        _ = stream.answer
    pieces = list(stream)
    assert [piece.text for piece in pieces] == ["the", " ", "", "é", "!", ""]
    assert [piece.finish for piece in pieces] == [None] * 5 + ["stop"]
    assert stream.answer.text == "the é!" and stream.answer.finish == "stop"
    assert stream.answer.seed == stream.request.seed
    stream.close()
    assert stream.answer.finish == "stop" and list(stream) == []


def test_closing_a_stream_keeps_what_was_said(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    with Engine(model, tokenizer).stream(Request(ids=(1, 2))) as stream:
        said = [next(stream) for _ in range(3)]
    assert model.caches[0]() is None
    assert stream.answer.finish == "cancelled" and stream.answer.ids == tuple(piece.id for piece in said)
    assert list(stream) == []
    unread = Engine(model, tokenizer).stream(Request(ids=(1, 2)))
    unread.close()
    assert unread.answer.usage.output == 0 and len(model.caches) == 1


def test_closing_from_another_thread(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    stream = Engine(model, tokenizer).stream(Request(ids=(1, 2), max_tokens=60))
    at_work, go_on = threading.Event(), threading.Event()
    seen: list[Piece] = []

    def on_hidden() -> None:
        if len(model.chunks) == 4:
            at_work.set()
            assert go_on.wait(20)

    model.on_hidden = on_hidden
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    assert at_work.wait(20)
    stream.close()  # while the reader is inside a step
    go_on.set()
    reader.join(20)
    assert not reader.is_alive() and len(model.chunks) == 4
    assert seen[-1].finish == "cancelled" and stream.answer.usage.output == 4
    assert model.caches[0]() is None


def test_an_interrupt_inside_a_step_leaves_a_closable_stream(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    stream = Engine(model, tokenizer).stream(Request(ids=(1, 2)))

    def interrupt() -> None:
        if len(model.chunks) == 3:
            raise KeyboardInterrupt

    model.on_hidden = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    stream.close()
    assert stream.answer.finish == "cancelled" and stream.answer.usage.output == 2


def test_a_shared_event_cancels_a_stream_and_closing_does_not_set_it(watched: Make, tokenizer: Tokenizer) -> None:
    cancel, engine = threading.Event(), Engine(watched(), tokenizer)
    first, second = (engine.stream(Request(ids=(1, 2)), cancel=cancel) for _ in range(2))
    next(first), next(second)
    first.close()
    assert not cancel.is_set() and next(second).finish is None
    cancel.set()
    assert [piece.finish for piece in second] == ["cancelled"]
    assert second.answer.usage.output == 2
