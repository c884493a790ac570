"""Saved sessions: what is in the file, and that a resumed one goes on as if it had never stopped."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import OrchardError, UsageError
from orchard.session.errors import TranscriptError
from orchard.session.options import GenerationOptions, SamplingMode
from orchard.session.policies import Summarise
from orchard.session.session import Session
from orchard.testing import ScriptedModel, ToolCall


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def talked(*answers: Any, **setup: Any) -> Session:
    session = Session("Be kind.", model=ScriptedModel(answers), **setup)
    for number in range(len([answer for answer in answers if isinstance(answer, str)])):
        session.respond(f"question {number}")
    return session


def test_a_resumed_session_asks_exactly_what_the_other_would_have(tmp_path: Path) -> None:
    options = GenerationOptions(SamplingMode.random(top=5, seed=7), maximum_response_tokens=50)
    session = talked("one", ToolCall("add", {"a": 1, "b": 2}), "two", tools=[add], options=options)
    session.save(tmp_path / "talk.json")
    model, other = ScriptedModel(["three"]), ScriptedModel(["three"])
    resumed = Session.resume(tmp_path / "talk.json", model=model, tools=[add])
    again = Session(model=other, transcript=session.transcript.copy(), tools=[add], options=options)
    assert resumed.respond("next").text == again.respond("next").text
    assert model.turns == other.turns
    assert resumed.usage.output == session.usage.output + 1


def test_the_file_is_plain_json_with_the_transcript_in_the_sdk_format(tmp_path: Path) -> None:
    session = talked("one", properties={"user": "Ada"})
    session.save(tmp_path / "talk.json")
    document = json.loads((tmp_path / "talk.json").read_text())
    assert document["type"] == "Orchard.Session" and document["model"] == "scripted"
    assert document["transcript"] == session.transcript.to_json_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    resumed = Session.resume(tmp_path / "talk.json", model=ScriptedModel())
    assert resumed.properties == {"user": "Ada"} and resumed.transcript == session.transcript


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    session = talked("one")
    session.save(tmp_path / "a.json")
    session.transcript = []
    session.save(tmp_path / "a.json")
    assert len(Session.resume(tmp_path / "a.json", model=ScriptedModel()).transcript) == 0


def test_what_the_policy_had_summed_up_is_not_summed_up_again(tmp_path: Path) -> None:
    long = "word " * 50
    policy, options = Summarise(keep_turns=1, words=2), GenerationOptions(maximum_response_tokens=4)
    model = ScriptedModel(["a", "b", "SHORT", "c"], context_size=160)
    session = Session(model=model, policy=policy, options=options)
    for name in ("one", "two", "three"):
        session.respond(f"{name} {long}")
    session.save(tmp_path / "talk.json")
    again = ScriptedModel(["d"], context_size=160)
    resumed = Session.resume(tmp_path / "talk.json", model=again, policy=policy)
    assert resumed.respond("four").text == "d"
    assert "SHORT" in again.turns[0].messages[0].content and again.remaining == 0


def test_settings_given_again_are_stronger(tmp_path: Path) -> None:
    talked("one", options=GenerationOptions(temperature=0.5), adapters=("a",)).save(tmp_path / "a.json")
    model = ScriptedModel(["x", "y"])
    Session.resume(tmp_path / "a.json", model=model).respond("q")
    Session.resume(tmp_path / "a.json", model=model, options=GenerationOptions(temperature=0.9)).respond("q")
    assert [turn.sampling.temperature for turn in model.turns] == [0.5, 0.9]
    assert model.turns[0].adapters == ("a",)


class Keeper(ScriptedModel):
    """An executor that keeps what it has read."""

    loaded: bytes | None = None
    broken = False

    def save_prefix(self, messages: Any, tools: Any, path: Path) -> int:
        return path.write_bytes(repr([message.content for message in messages]).encode()) if len(messages) > 1 else 0

    def load_prefix(self, path: Path) -> None:
        if self.broken:
            raise OrchardError("of another model", hint="read it again")
        self.loaded = path.read_bytes()


def test_what_the_engine_has_read_is_kept_beside(tmp_path: Path) -> None:
    session = Session(model=Keeper(["one"]))
    session.respond("q")
    session.save(tmp_path / "a.json")
    model = Keeper(["two"])
    Session.resume(tmp_path / "a.json", model=model)
    assert model.loaded == b"['q', 'one']"
    session.save(tmp_path / "b.json", cache=False)
    assert not (tmp_path / "b.json.prefix").exists()
    del session.transcript[1:]
    session.save(tmp_path / "a.json")
    assert not (tmp_path / "a.json.prefix").exists()  # it was of a longer conversation


def test_a_cache_of_another_model_costs_only_time(tmp_path: Path) -> None:
    session = Session(model=Keeper(["one"]))
    session.respond("q")
    session.save(tmp_path / "a.json")
    model = Keeper(["two"])
    model.broken = True
    assert Session.resume(tmp_path / "a.json", model=model).respond("r").text == "two"


def test_a_session_that_answers_cannot_be_saved(tmp_path: Path) -> None:
    session = Session(model=ScriptedModel(["one two"]))
    with session.stream("q") as stream:
        next(stream)
        with pytest.raises(TranscriptError, match="answering"):
            session.save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_properties_that_are_no_json(tmp_path: Path) -> None:
    session = talked("one", properties={"file": object()})
    with pytest.raises(UsageError, match="properties"):
        session.save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"type":"Orchard.Session","version":2}',
        b'{"type":"Orchard.Session","version":1}',
        b"\xff",
    ],
)
def test_files_that_are_no_sessions(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TranscriptError) as caught:
        Session.resume(path, model=ScriptedModel())
    assert str(path) in str(caught.value) and caught.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match="cannot be read"):
        Session.resume(tmp_path / "nothing.json", model=ScriptedModel())


_SAVED = {
    "type": "Orchard.Session",
    "version": 1,
    "model": "scripted",
    "transcript": {"version": 1, "type": "FoundationModels.Transcript", "transcript": {"entries": []}},
    "view": None,
    "usage": {"input": 1, "cached": 0, "output": 1, "reasoning": 0, "calls": 1},
    "options": {"temperature": 0.5},
    "adapters": [],
    "properties": {},
}


@given(
    st.sampled_from(sorted(_SAVED)),
    st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
)
@settings(max_examples=60)
def test_damage_is_a_typed_error_or_does_not_matter(tmp_path_factory: Any, key: str, value: Any) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.json"
    path.write_text(json.dumps({**_SAVED, key: value}))
    with suppress(OrchardError):
        Session.resume(path, model=ScriptedModel())
