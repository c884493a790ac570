"""Streams of snapshots, the wanted form of an answer, and the line in which requests wait."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import Cancelled, OrchardError, UsageError
from orchard.session.errors import ConcurrentRequestsError, RateLimitedError
from orchard.session.schema import generable, guide
from orchard.session.session import Session
from orchard.session.streams import Line, Snapshot, Wanted
from orchard.testing import Answer, ScriptedModel, ToolCall


@generable
class Trip:
    title: str = guide("a title")
    days: int = guide("how many", range=(1, 9))
    stops: list[str] = guide("towns", max_items=4)


def session_of(*answers: Any, **script: Any) -> Session:
    return Session(model=ScriptedModel(answers, **script), guardrails=None)


def test_snapshots_hold_all_and_what_is_new() -> None:
    stream = session_of("one two three").stream("go")
    seen = list(stream)
    assert [snapshot.content for snapshot in seen[:3]] == ["one ", "one two ", "one two three"]
    assert "".join(snapshot.delta for snapshot in seen) == "one two three" == seen[-1].content
    assert seen[-1].usage == stream.response.usage and seen[0].usage is None
    assert stream.response.text == "one two three"


def test_deltas_and_collect() -> None:
    session = session_of("one two", "three four")
    assert list(session.stream("a").deltas()) == ["one ", "two"]
    assert session.stream("b").collect().text == "three four"
    assert len(session.transcript) == 4


def test_the_response_is_there_only_at_the_end() -> None:
    stream = session_of("one two").stream("go")
    next(stream)
    with pytest.raises(UsageError, match="not complete"):
        _ = stream.response
    stream.close()
    with pytest.raises(OrchardError, match="closed"):
        stream.collect()


def test_fields_arrive_in_declaration_order_as_typed_partials_apple_fails() -> None:
    answer = {"title": "Round the lake", "days": 3, "stops": ["Como", "Lecco"]}
    text = '{"title":"Round the lake","days":3,"stops":["Como","Lecco"]}'
    stream = session_of(Answer(answer, pieces=tuple(text))).stream("go", Trip)
    order: list[str] = []
    titles: list[str] = []
    for snapshot in stream:
        partial = snapshot.content
        if isinstance(partial, str) or partial is None:
            continue
        for name in ("title", "days", "stops"):
            if getattr(partial, name) is not None and name not in order:
                order.append(name)
        if partial.title is not None:
            titles.append(partial.title)
    assert order == ["title", "days", "stops"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(titles))
    assert stream.response.content.stops == ["Como", "Lecco"] and isinstance(stream.response.content, Trip)


def test_the_last_partial_equals_the_answer() -> None:
    stream = session_of({"title": "Lake", "days": 3, "stops": []}).stream("go", Trip)
    last = list(stream)[-1]
    assert (last.content.title, last.content.days, last.content.stops) == ("Lake", 3, [])
    assert last.raw_content is not None


def test_leaving_early_stops_the_model_and_keeps_no_turn() -> None:
    model = ScriptedModel(["word " * 100, "fine"])
    session = Session(model=model, guardrails=None)
    with session.stream("go") as stream:
        for count, _ in enumerate(stream):
            if count == 3:
                break
    assert len(session.transcript) == 0 and session.respond("again").text == "fine"
    assert session.usage.output == 1  # of what was left early nobody counted the tokens


def test_an_error_in_the_middle_reaches_the_reader() -> None:
    session = session_of(Answer("one two", error=RateLimitedError("busy")))
    stream = session.stream("go")
    assert next(stream).text == "one " and next(stream).text == "one two"
    with pytest.raises(RateLimitedError):
        next(stream)
    assert len(session.transcript) == 0 and not session.is_responding


def test_tools_are_called_inside_a_stream() -> None:
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    model = ScriptedModel([ToolCall("add", {"a": 1, "b": 2}), "It is 3."])
    session = Session(model=model, tools=[add], guardrails=None)
    seen = list(session.stream("1+2?"))
    assert seen[-1].content == "It is 3." and seen[-1].usage is not None


def test_wrong_forms_raise_when_the_stream_is_made() -> None:
    with pytest.raises(UsageError):
        session_of("x").stream("go", regex="a", choices=["b"])


def test_a_stream_of_nothing_still_ends_with_a_snapshot() -> None:
    assert [snapshot.content for snapshot in session_of("").stream("go")] == [""]


def test_a_guarded_stream_shows_everything_in_the_end() -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    session = Session(model=ScriptedModel([text]))
    seen = list(session.stream("go"))
    assert seen[-1].text == text == "".join(snapshot.delta for snapshot in seen)


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8))
@settings(max_examples=40)
def test_deltas_always_add_up(pieces: list[str]) -> None:
    seen = list(session_of(Answer("", pieces=tuple(pieces))).stream("go"))
    assert "".join(snapshot.delta for snapshot in seen) == "".join(pieces) == seen[-1].content
    assert all(snapshot.text.endswith(snapshot.delta) for snapshot in seen)


# Forms


@dataclass
class Pair:
    a: int
    b: int


def test_forms_say_what_the_model_is_told() -> None:
    assert Wanted.of().words() == "" and Wanted.of(regex="a+").words() == ""
    assert "yes" in Wanted.of(choices=["yes", "no"]).words()
    assert "b" in Wanted.of(Pair).words()
    form = Wanted.of(Pair).format()
    assert form is not None and form.schema["properties"].keys() == {"a", "b"}


def test_snapshots_are_values() -> None:
    assert Snapshot("a") == Snapshot("a") != Snapshot("b")


# The line


def test_one_at_a_time_in_order() -> None:
    line, order = Line(), []
    places = [line.take() for _ in range(5)]

    def serve(number: int) -> None:
        places[number].wait()
        order.append(number)
        time.sleep(0.002)
        places[number].leave()

    threads = [threading.Thread(target=serve, args=(number,)) for number in (3, 1, 4, 0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3, 4] and not line.busy


def test_one_that_waits_can_be_cancelled_and_does_not_block_the_next() -> None:
    line = Line()
    first, second, third = (line.take() for _ in range(3))
    second.cancel()
    with pytest.raises(Cancelled):
        second.wait()
    second.leave()
    first.leave()
    third.wait()
    third.leave()
    third.leave()
    assert not line.busy and not line.cancel_first()


def test_a_thread_does_not_wait_for_itself() -> None:
    line = Line()
    place = line.take(thread=1)
    with pytest.raises(ConcurrentRequestsError):
        line.take(thread=1)
    line.take(thread=2).leave()
    place.leave()
    line.take(thread=1).leave()
