"""The file format: what is read is written again, and damage is named by its place or does no harm."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.session.errors import FoundationModelsError, TranscriptError
from orchard.session.transcript import (
    Instructions,
    Prompt,
    Reasoning,
    Response,
    StructureSegment,
    ToolCalls,
    ToolOutput,
    Transcript,
    entries,
    wire,
)
from tests.session.transcript.documents import JSON, a_document, damaged, documents, places, with_extras


def test_every_kind_of_entry_is_read() -> None:
    transcript = Transcript.from_json_dict(a_document())
    instructions, prompt, calls, output, empty, answer, _, thought, last = transcript
    assert isinstance(instructions, Instructions) and isinstance(prompt, Prompt) and isinstance(calls, ToolCalls)
    assert isinstance(output, ToolOutput) and isinstance(answer, Response) and isinstance(thought, Reasoning)
    assert isinstance(empty, ToolOutput) and empty.text == ""
    assert instructions.tools and instructions.tools[0].name == "departures"
    assert instructions.tools[0].parameters["x-order"] == ["station", "limit"]
    assert prompt.options == {"temperature": 0.5} and prompt.response_format and prompt.response_format.name == "Train"
    assert [call.values for call in calls] == [{"station": "Bergen", "limit": 1}, {"station": "Voss"}]
    assert (output.tool_name, output.call_id, output.id) == ("departures", "T-1", "T-1")
    assert answer.assets == ("smollm2",) and isinstance(answer.segments[0], StructureSegment)
    assert answer.segments[0].source == "Train" and answer.segments[0].content["late"] is None
    assert isinstance(last, Response) and last.assets is None and last.text == "Good trip!"


@pytest.mark.parametrize("document", [a_document(), with_extras(a_document())], ids=["plain", "extras"])
def test_what_is_read_is_written_again(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    transcript = Transcript.from_json_dict(document)
    written = transcript.to_json_dict()
    assert written == before == document
    assert Transcript.from_json_dict(written) == transcript
    # Letter for letter, but for the order of keys.
    assert json.dumps(written, sort_keys=True) == json.dumps(before, sort_keys=True)


def test_extras_follow_a_changed_entry() -> None:
    from dataclasses import replace

    transcript = Transcript.from_json_dict(with_extras(a_document()))
    transcript[-1] = replace(transcript[-1], segments="Bye!")
    written = transcript.to_json_dict()
    assert written["transcript"]["entries"][-1]["metadata"] == {"nested": [1, {"two": 2.5}]}
    assert written["transcript"]["entries"][-1]["contents"][0]["text"] == "Bye!"
    assert written["savedBy"]["build"] == 7 and written["transcript"]["locale"] == "nb_NO"
    assert transcript.copy().to_json_dict() == written


def test_a_dict_and_its_transcript_share_nothing() -> None:
    document = a_document()
    transcript = Transcript.from_json_dict(document)
    document["transcript"]["entries"][5]["contents"][0]["structure"]["content"]["to"] = "Rome"
    first = transcript.to_json_dict()
    first["transcript"]["entries"][5]["contents"][0]["structure"]["content"]["to"] = "Rome"
    assert transcript.to_json_dict() == a_document()


def test_what_is_made_by_hand_has_the_form() -> None:
    made = Transcript([Instructions("Be brief."), Prompt("Hi"), Response("Hello."), Reasoning("Hm.", "sig")])
    first, second, third, fourth = made.to_json_dict()["transcript"]["entries"]
    assert first.keys() == {"id", "role", "contents"} and second["options"] == {} and third["assets"] == []
    assert second["contents"] == [{"type": "text", "id": second["contents"][0]["id"], "text": "Hi"}]
    assert fourth["role"] == "reasoning" and fourth["signature"] == "sig"
    assert Transcript.from_json_dict(made.to_json_dict()) == made


def test_asynchronous_twins() -> None:
    async def there_and_back() -> dict[str, Any]:
        transcript = await Transcript.from_dict(a_document())
        return await transcript.to_dict()

    assert asyncio.run(there_and_back()) == a_document()


def _at(path: str, value: Any = ..., *, entry: int | None = None) -> dict[str, Any]:
    keys: list[Any] = [int(key) if key.isdigit() else key for key in path.split(".")]
    if entry is not None:
        keys = ["transcript", "entries", entry, *keys]
    return damaged(a_document(), tuple(keys), "delete" if value is ... else "replace", value)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "not a JSON object"),
        (None, "not a JSON object"),
        ("{}", "not a JSON object"),
        ({"invalid": "structure"}, "version None"),
        (_at("version", 2), "version 2"),
        (_at("version", "1.1"), "version '1.1'"),
        (_at("version", True), "version True"),
        (_at("version"), "version None"),
        (_at("type", "Transcript"), "type 'Transcript'"),
        (_at("type"), "type None"),
        (_at("transcript"), "transcript.transcript is missing"),
        (_at("transcript", []), "is not an object"),
        (_at("transcript.entries"), "transcript.entries is missing"),
        (_at("transcript.entries", {}), "transcript.entries is not a list"),
        (_at("transcript.entries.3", "hello"), r"entries\[3\] is not an object"),
        (_at("role", entry=1), r"entries\[1\].role is None"),
        (_at("role", "robot", entry=1), r"entries\[1\].role is 'robot'"),
        (_at("role", ["user"], entry=1), r"entries\[1\].role"),
        (_at("id", entry=1), r"entries\[1\].id is missing"),
        (_at("id", "", entry=1), r"entries\[1\].id is empty"),
        (_at("id", 5, entry=1), r"entries\[1\].id is not text"),
        (_at("contents", entry=1), r"entries\[1\].contents is missing"),
        (_at("contents", "hi", entry=1), r"entries\[1\].contents is not a list"),
        (_at("contents.0", 5, entry=1), r"entries\[1\].contents\[0\] is not an object"),
        (_at("contents.0.type", "image", entry=1), r"contents\[0\].type is 'image'"),
        (_at("contents.0.id", entry=1), r"contents\[0\].id is missing"),
        (_at("contents.0.text", entry=1), r"contents\[0\].text is missing"),
        (_at("contents.0.text", None, entry=1), r"contents\[0\].text is not text"),
        (_at("contents.0.text", "\ud800", entry=1), r"contents\[0\].text is not valid Unicode"),
        (_at("contents.0.structure", entry=5), r"contents\[0\].structure is missing"),
        (_at("contents.0.structure.content", entry=5), "structure.content is missing"),
        (_at("contents.0.structure.source", 1, entry=5), "structure.source is not text"),
        (_at("contents.0.structure.content", float("nan"), entry=5), "the number nan"),
        (_at("contents.0.structure.content", {1}, entry=5), "a set that JSON cannot hold"),
        (_at("contents.0.structure.content", {1: 2}, entry=5), "has the key 1"),
        (_at("contents.0.structure.content", 2**2000, entry=5), "an? int that JSON cannot hold"),
        (_at("options", [], entry=1), r"entries\[1\].options is not an object"),
        (_at("responseFormat", "json", entry=1), "responseFormat is not an object"),
        (_at("responseFormat.type", "text", entry=1), "responseFormat.type is 'text'"),
        (_at("responseFormat.jsonSchema.schema", True, entry=1), "jsonSchema.schema is not an object"),
        (_at("tools", {}, entry=0), "tools is not a list"),
        (_at("tools.0.type", entry=0), r"tools\[0\].type is None"),
        (_at("tools.0.function.description", entry=0), "function.description is missing"),
        (_at("tools.0.function.parameters", "{}", entry=0), "function.parameters is not an object"),
        (_at("toolCalls", "f()", entry=2), "toolCalls is not a list"),
        (_at("toolCalls.1.arguments", {"a": 1}, entry=2), r"toolCalls\[1\].arguments is not text"),
        (_at("toolCalls.1.arguments", "{'a': 1}", entry=2), r"toolCalls\[1\].arguments is not JSON"),
        (_at("toolCalls.1.arguments", "[1]", entry=2), r"toolCalls\[1\].arguments is of type list"),
        (_at("toolCalls.1.arguments", "[" * 100_000, entry=2), r"toolCalls\[1\].arguments is not JSON"),
        (_at("toolCalls.1.arguments", '{"a": NaN}', entry=2), "the number nan"),
        (_at("toolCalls.0.name", entry=2), r"toolCalls\[0\].name is missing"),
        (_at("toolName", entry=3), "toolName is missing"),
        (_at("toolCallID", "", entry=3), "toolCallID is empty"),
        (_at("assets", "smollm2", entry=5), "assets is not a list"),
        (_at("assets", [1], entry=5), r"assets\[0\] is not text"),
    ],
)
def test_damage_is_named_by_its_place(document: Any, says: str) -> None:
    with pytest.raises(TranscriptError, match=says) as caught:
        Transcript.from_json_dict(document)
    assert caught.value.hint and isinstance(caught.value, FoundationModelsError)


def test_calls_and_contents_together_are_refused() -> None:
    document = a_document()
    document["transcript"]["entries"][2]["contents"] = [{"type": "text", "id": "a", "text": "Let me see."}]
    with pytest.raises(TranscriptError, match="both contents and toolCalls"):
        Transcript.from_json_dict(document)
    document["transcript"]["entries"][2]["contents"] = []
    assert Transcript.from_json_dict(document).to_json_dict() == document
    document["transcript"]["entries"][5]["toolCalls"] = []
    assert Transcript.from_json_dict(document)[5].text == '{"to":"Oslo","minutes":12,"late":null}'


def test_null_means_absent() -> None:
    document = a_document()
    document["transcript"]["entries"][1] |= {"options": None, "responseFormat": None}
    document["transcript"]["entries"][5]["assets"] = None
    transcript = Transcript.from_json_dict(document)
    assert transcript.to_json_dict() == document


def test_depth_is_bounded_and_the_bound_is_the_same_both_ways(tmp_path: Path) -> None:
    deepest: Any = "x"
    for _ in range(entries.DEEPEST):
        deepest = [deepest]
    transcript = Transcript([Response(StructureSegment("Deep", deepest))])
    transcript.save(tmp_path / "deep.json")
    assert Transcript.load(tmp_path / "deep.json") == transcript
    with pytest.raises(TranscriptError, match="deeper than 64 levels"):
        StructureSegment("Deep", [deepest])
    document = a_document() | {"extra": deepest}
    for _ in range(100_000):
        document["extra"] = [document["extra"]]
    with pytest.raises(TranscriptError, match="deeper than 64 levels"):
        Transcript.from_json_dict(document)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_ENTRIES", 8)
    with pytest.raises(TranscriptError, match="more than 8 entries"):
        Transcript.from_json_dict(a_document())
    monkeypatch.setattr(entries, "MOST_CHARACTERS", 100)
    with pytest.raises(TranscriptError, match="too large"):
        Transcript.from_json_dict(a_document())
    monkeypatch.undo()
    monkeypatch.setattr(entries, "MOST_VALUES", 20)
    with pytest.raises(TranscriptError, match="too large"):
        Transcript.from_json_dict(a_document())
    monkeypatch.undo()
    transcript, path = Transcript.from_json_dict(a_document()), tmp_path / "t.json"
    transcript.save(path)
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    with pytest.raises(TranscriptError, match="too large"):
        Transcript.load(path)
    with pytest.raises(TranscriptError, match="too large"):
        transcript.save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "t.json"
    transcript = Transcript.from_json_dict(with_extras(a_document()))
    transcript.save(path)
    assert Transcript.load(str(path)) == transcript and "❤" in path.read_text("utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["t.json"]  # nothing temporary stays


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b'{"version": 1, "ty', "not JSON"),
        (b"\xff\xfe\x00", "not JSON|not a JSON"),
        (b"[" * 200_000, "not JSON|not a JSON"),
        (b'{"version": 1, "version": 1}', "key 'version' twice"),
        (b'{"version": NaN}', "NaN"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not JSON|version"),
        (b'{"version": 1, "extra": 1e999}', "the number inf"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TranscriptError, match=says) as caught:
        Transcript.load(path)
    assert caught.value.hint


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TranscriptError, match="cannot be read"):
            Transcript.load(path)


@given(documents())
def test_any_document_makes_the_round_trip(document: dict[str, Any]) -> None:
    transcript = Transcript.from_json_dict(document)
    assert transcript.to_json_dict() == document
    assert Transcript.from_json_dict(wire.parse(json.dumps(document))) == transcript


PLACES = places(with_extras(a_document()))
HOW = st.sampled_from(["delete", "replace", "other"])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(PLACES), HOW, JSON | st.just({1, 2})), min_size=1, max_size=3))
def test_damage_is_refused_or_kept_as_it_is(damage: list[tuple[tuple[Any, ...], str, Any]]) -> None:
    """Nothing is lost or invented: whatever is accepted is written again as it was."""
    document = with_extras(a_document())
    for path, how, value in damage:
        try:
            document = damaged(document, path, how, value)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier damage took the place away
    try:
        transcript = Transcript.from_json_dict(document)
    except TranscriptError:
        return
    assert transcript.to_json_dict() == document
    transcript.messages(), str(transcript), transcript._repr_html_()


@settings(max_examples=200)
@given(st.data())
def test_files_with_a_hole_or_a_flip(data: st.DataObject) -> None:
    text = bytearray(json.dumps(a_document()).encode())
    start = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        del text[start : start + data.draw(st.integers(1, 40))]
    else:
        text[start] = data.draw(st.integers(0, 255))
    try:
        transcript = Transcript.from_json_dict(wire.parse(bytes(text)))
    except TranscriptError:
        return
    assert transcript.to_json_dict() == json.loads(bytes(text))
