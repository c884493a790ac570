"""The test double: what a script may say, what it is held to, and that no real model is loaded where that is forbidden."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orchard
from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.session.errors import AssetsUnavailableError, RateLimitedError
from orchard.session.schema import generable
from orchard.session.session import Session
from orchard.session.turn import Done, Executor, Reasoning, Text, Turn
from orchard.testing import Answer, ScriptedModel, ScriptError, ToolCall, matches, scripted
from orchard.text.messages import Message


@generable
class Pet:
    name: str
    age: int


@dataclass
class Plain:
    b: int
    a: str


def turn(**more: Any) -> Turn:
    return Turn((Message("user", "hello"),), tool_mode="disallowed", **more)


def run(model: ScriptedModel, asked: Turn | None = None) -> list[Any]:
    return list(model.run(asked or turn(), threading.Event()))


def test_it_is_an_executor() -> None:
    assert isinstance(ScriptedModel(), Executor)


def test_texts_come_word_by_word_and_end_with_done() -> None:
    events = run(ScriptedModel(["one two"]))
    assert [event.delta for event in events if isinstance(event, Text)] == ["one ", "two"]
    assert isinstance(events[-1], Done) and events[-1].finish == "stop" and events[-1].usage.output == 2


def test_it_records_what_was_asked_and_says_what_is_left() -> None:
    model = ScriptedModel(["a", "b"])
    run(model)
    assert model.prompts == ["hello"] and model.remaining == 1 and len(model.turns) == 1


def test_a_script_that_runs_out_says_so() -> None:
    model = ScriptedModel(["a"])
    run(model)
    with pytest.raises(ScriptError, match="1 answers and was asked for one more: 'hello'"):
        run(model)
    model.add("b")
    run(model)


def test_a_script_can_begin_again() -> None:
    model = ScriptedModel(["a", "b"], repeat=True)
    said = ["".join(event.delta for event in run(model) if isinstance(event, Text)) for _ in range(5)]
    assert said == ["a", "b", "a", "b", "a"]


def test_errors_and_error_types_are_raised() -> None:
    model = ScriptedModel([RateLimitedError("later"), RateLimitedError])
    for _ in range(2):
        with pytest.raises(RateLimitedError):
            run(model)


def test_functions_of_the_turn() -> None:
    model = ScriptedModel([lambda asked: asked.messages[-1].content.upper()])
    assert run(model)[0].delta == "HELLO"


@pytest.mark.parametrize(
    "answer",
    [{"age": 3, "name": "Tom"}, '{"name":"Tom","age":3}', '{ "name": "Tom",\n "age": 3 }'],
)
def test_objects_for_guided_calls_in_any_order_of_keys(answer: Any) -> None:
    assert Session(model=ScriptedModel([answer])).respond("pet", Pet).content == Pet("Tom", 3)


def test_an_instance_can_be_the_answer() -> None:
    session = Session(model=ScriptedModel([Pet("Tom", 3), Plain(1, "x")]))
    assert session.respond("pet", Pet).content == Pet("Tom", 3)
    assert session.respond("plain", Plain).content == Plain(1, "x")


@pytest.mark.parametrize("answer", [{"name": "Tom"}, {"name": "Tom", "age": "three"}, "Tom", [], {"name": 1, "age": 2}])
def test_an_answer_that_no_model_could_give_is_an_error_of_the_script(answer: Any) -> None:
    session = Session(model=ScriptedModel([answer]))
    with pytest.raises(ScriptError, match="answer 1 of the script does not match"):
        session.respond("pet", Pet)


def test_choices_and_patterns_are_checked() -> None:
    session = Session(model=ScriptedModel(["maybe", "abc"]))
    with pytest.raises(ScriptError):
        session.respond("?", choices=["yes", "no"])
    with pytest.raises(ScriptError):
        session.respond("?", regex=r"\d+")


def test_tools_are_checked() -> None:
    def known() -> str:
        """A tool."""
        return ""

    session = Session(model=ScriptedModel([ToolCall("unknown"), "text"]), tools=[known])
    with pytest.raises(ScriptError, match="known"):
        session.respond("go")
    with pytest.raises(ScriptError, match="required"):
        session.respond("go", options=orchard.fm.GenerationOptions(tool_calling_mode="required"))


def test_an_unchecked_answer_is_given_as_it_is() -> None:
    assert run(ScriptedModel([Answer("nonsense", checked=False)]), turn(constraint=Constraint.choices(["a"])))


def test_stops_and_lengths() -> None:
    events = run(ScriptedModel(["one two END three"]), turn(stop=("END",)))
    assert "".join(event.delta for event in events if isinstance(event, Text)) == "one two "
    assert run(ScriptedModel(["one two three"]), turn(max_tokens=1))[-1].finish == "length"


def test_reasoning_comes_first() -> None:
    events = run(ScriptedModel([Answer("x", reasoning="hm hm")]))
    assert [type(event) for event in events] == [Reasoning, Reasoning, Text, Done]
    assert events[-1].usage.reasoning == 2


def test_cancelling_ends_a_delay_at_once() -> None:
    cancel = threading.Event()
    events = ScriptedModel([Answer("a b c", delay=5)]).run(turn(), cancel)
    threading.Timer(0.05, cancel.set).start()
    began = time.monotonic()
    assert next(events) == Done("cancelled", events_usage()) and time.monotonic() - began < 2


def events_usage() -> Any:
    return run(ScriptedModel([""]))[-1].usage


def test_answers_that_are_one_text() -> None:
    with pytest.raises(UsageError, match="one text"):
        ScriptedModel("hello")


def test_something_that_is_no_answer() -> None:
    with pytest.raises(ScriptError, match="object cannot be"):
        run(ScriptedModel([object()]))


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda of: st.lists(of, max_size=3))
)
@settings(max_examples=50)
def test_any_json_goes_through_as_it_is(value: Any) -> None:
    model = ScriptedModel([Answer(value, checked=False)])
    text = "".join(event.delta for event in run(model) if isinstance(event, Text))
    assert (text == value) if isinstance(value, str) else (json.loads(text) == value)


@given(st.text(alphabet="ab1", max_size=6))
def test_matching_is_of_the_whole_text(text: str) -> None:
    import re

    assert matches(Constraint.regex("a+b?"), text) == bool(re.fullmatch("a+b?", text))


def test_a_script_stands_in_for_every_model_that_is_named() -> None:
    with scripted(["one", "two"]) as model:
        assert Session().respond("a").text == "one"
        assert Session(model="some-other").respond("b").text == "two"
        assert orchard.fm.SystemLanguageModel().is_available() == (True, None)
    assert model.prompts == ["a", "b"]


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_real_models_can_be_forbidden(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ORCHARD_FORBID_MODELS", value)
    with pytest.raises(AssetsUnavailableError, match="ORCHARD_FORBID_MODELS"):
        Session()
    assert Session(model=ScriptedModel(["fine"])).respond("a").text == "fine"
    available, reason = orchard.fm.SystemLanguageModel().is_available()
    assert not available and reason is not None


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_they_are_not_forbidden_otherwise(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from orchard.session.assets import models_forbidden

    monkeypatch.setenv("ORCHARD_FORBID_MODELS", value)
    assert not models_forbidden()


def test_orchard_has_the_names_lazily() -> None:
    assert orchard.Session is Session and orchard.testing.ScriptedModel is ScriptedModel
    assert {"Session", "fm", "testing"} <= set(dir(orchard))
