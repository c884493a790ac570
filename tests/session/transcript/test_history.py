"""A transcript as a sequence, as messages for a model, and for people to read; locked while an answer is on its way."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.session.errors import TranscriptError
from orchard.session.transcript import (
    Entry,
    Instructions,
    Prompt,
    Reasoning,
    Response,
    StructureSegment,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from orchard.text.messages import Message, messages_from
from tests.session.transcript.documents import a_document, documents


def talk() -> Transcript:
    return Transcript(
        [
            Instructions("Be brief.", id="i"),
            Prompt("What is 2+2?", id="p1"),
            Reasoning("Use the tool.", id="t1"),
            ToolCalls([ToolCall("add", {"a": 2, "b": 2}, "c1")], id="c"),
            ToolOutput("add", "4", "c1", id="o"),
            Response("It is 4.", id="r1"),
            Prompt("And as JSON?", id="p2"),
            Response([StructureSegment("Sum", {"value": 4, "exact": True})], id="r2"),
        ]
    )


def ids(transcript: Transcript) -> list[str]:
    return [entry.id for entry in transcript]


def test_a_mutable_sequence() -> None:
    transcript = talk()
    assert len(transcript) == 8 and transcript[0].id == "i" and transcript[-1].id == "r2"
    assert isinstance(transcript[1:3], Transcript) and ids(transcript[1:3]) == ["p1", "t1"]
    transcript.append(Prompt("More", id="p3"))
    transcript.insert(0, Instructions("First", id="i0"))
    transcript.extend([Response("Yes", id="r3")])
    transcript += [Prompt("?", id="p4")]
    assert ids(transcript)[0] == "i0" and ids(transcript)[-3:] == ["p3", "r3", "p4"]
    del transcript[0], transcript[-2:]
    transcript[-1] = Prompt("Other", id="new")
    transcript[0:2] = [Instructions("Only", id="only")]
    assert transcript.pop().id == "new" and ids(transcript)[:2] == ["only", "t1"]
    assert transcript.index(transcript[2]) == 2 and transcript[2] in transcript
    transcript.remove(transcript[0])
    transcript.reverse()
    assert transcript[0].id == "r2"
    transcript.clear()
    assert not transcript and transcript == Transcript()


@pytest.mark.parametrize("wrong", ["hello", {"role": "user"}, None, Message("user", "a")])
def test_only_entries_may_be_in_it(wrong: object) -> None:
    transcript = talk()
    before = transcript.copy()
    changes: list[Callable[[], object]] = [
        lambda: transcript.append(wrong),  # type: ignore[arg-type]
        lambda: transcript.__setitem__(0, wrong),  # type: ignore[call-overload]
        lambda: transcript.__setitem__(slice(0, 1), [wrong]),
        lambda: Transcript([wrong]),  # type: ignore[list-item]
    ]
    for change in changes:
        with pytest.raises(TranscriptError, match="is no entry of a transcript"):
            change()
    assert transcript == before


def test_copies_are_apart() -> None:
    transcript = talk()
    for other in (transcript.copy(), copy.copy(transcript), copy.deepcopy(transcript), transcript[:]):
        assert other == transcript and other is not transcript
        other.append(Prompt("x"))
        assert other != transcript and len(transcript) == 8
    assert transcript != list(transcript) and transcript != Transcript(list(transcript)[:-1])
    with pytest.raises(TypeError, match="unhashable"):
        hash(transcript)


def test_iterating_while_changing() -> None:
    transcript = talk()
    for number, entry in enumerate(transcript):
        assert number < 8
        transcript.append(entry)
    assert len(transcript) == 16


def test_history_instructions_and_turns() -> None:
    transcript = talk()
    assert ids(transcript.history) == ids(transcript)[1:] and transcript.instructions == "Be brief."
    assert Transcript([Prompt("a")]).instructions is None
    assert [[entry.id for entry in turn] for turn in transcript.turns()] == [
        ["p1", "t1", "c", "o", "r1"],
        ["p2", "r2"],
    ]
    assert Transcript().turns() == []
    odd = Transcript([Response("Welcome.", id="r0"), *transcript])
    assert [turn[0].id for turn in odd.turns()] == ["r0", "p1", "p2"]


@given(documents())
def test_turns_are_the_history_in_order(document: dict[str, object]) -> None:
    transcript = Transcript.from_json_dict(document)
    assert [entry for turn in transcript.turns() for entry in turn] == list(transcript.history)


def test_locked_while_an_answer_is_on_its_way() -> None:
    transcript = talk()
    before = transcript.copy()
    changes: list[Callable[[], object]] = [
        lambda: transcript.append(Prompt("x")),
        lambda: transcript.insert(0, Prompt("x")),
        lambda: transcript.extend([Prompt("x")]),
        lambda: transcript.pop(),
        lambda: transcript.clear(),
        lambda: transcript.reverse(),
        lambda: transcript.__setitem__(0, Prompt("x")),
        lambda: transcript.__setitem__(slice(0, 2), []),
        lambda: transcript.__delitem__(0),
    ]
    with transcript.busy() as record:
        assert transcript.locked and "locked" in repr(transcript)
        for change in changes:
            with pytest.raises(TranscriptError, match="while an answer is on its way"):
                change()
        assert transcript == before and not transcript.copy().locked
        with transcript.busy():  # two at a time: the last one to end unlocks
            pass
        assert transcript.locked
        with pytest.raises(TranscriptError, match="no entry"):
            record(Prompt("x"), "y")
        assert transcript == before  # all or none
        record(Prompt("x"), Response("y"))
    assert not transcript.locked and len(transcript) == len(before) + 2
    with pytest.raises(ZeroDivisionError), transcript.busy():
        raise ZeroDivisionError
    transcript.append(Prompt("free again"))


def test_locks_of_many_threads_are_counted() -> None:
    transcript = talk()

    def hold() -> None:
        for _ in range(500):
            with transcript.busy():
                pass

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not transcript.locked


def test_messages() -> None:
    system, question, calls, output, answer, second, structured = talk().messages()
    assert system == Message("system", "Be brief.") and question == Message("user", "What is 2+2?")
    function = {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert calls == Message("assistant", "", tool_calls=[{"id": "c1", "type": "function", "function": function}])
    assert output == Message("tool", "4", name="add", tool_call_id="c1")
    assert answer == Message("assistant", "It is 4.") and second.role == "user"
    assert structured.content == '{"value":4,"exact":true}'
    assert messages_from(talk().messages()) == talk().messages()  # what the chat template takes


def test_messages_as_plain_text_for_models_without_tools() -> None:
    messages = talk().messages(tool_format="text")
    assert messages[2] == Message("assistant", '{"name":"add","arguments":{"a":2,"b":2}}')
    assert messages[3] == Message("user", "Result of add: 4")
    assert not any(message.tool_calls or message.role == "tool" for message in messages)
    with pytest.raises(TranscriptError, match="no tool format"):
        talk().messages(tool_format="xml")  # type: ignore[arg-type]


def test_messages_with_thoughts() -> None:
    assert "Use the tool." not in str(talk().messages())
    assert talk().messages(reasoning=True)[2] == Message("assistant", "<think>\nUse the tool.\n</think>")


def test_words_before_a_call_are_one_message_with_it() -> None:
    calls = ToolCalls([ToolCall("add", {}, "c1")])
    said = Transcript([Prompt("a"), Response("Let me see."), calls])
    assert [message.role for message in said.messages()] == ["user", "assistant"]
    assert said.messages()[1].content == "Let me see." and said.messages()[1].tool_calls
    assert said.messages(tool_format="text")[1].content == 'Let me see.\n{"name":"add","arguments":{}}'
    assert Transcript([Prompt("a"), ToolCalls([])]).messages() == [Message("user", "a")]


def test_instructions_at_the_beginning_are_one_message() -> None:
    start: list[Entry] = [Instructions("A"), Instructions(""), Instructions("B")]
    assert Transcript(start).messages() == [Message("system", "A\n\nB")]
    later = Transcript([*start, Prompt("Hi"), Instructions("C")]).messages()
    assert [message.content for message in later] == ["A\n\nB", "Hi", "C"]
    assert Transcript([Instructions(""), Prompt("Hi")]).messages() == [Message("user", "Hi")]


def test_for_people() -> None:
    assert repr(talk()) == "<Transcript: 8 entries in 2 turns>"
    assert repr(talk()[:2]) == "<Transcript: 2 entries in 1 turn>"
    assert str(talk()).splitlines()[1:5] == [
        "User: What is 2+2?",
        "Thought: Use the tool.",
        'Assistant calls: add({"a":2,"b":2})',
        "Tool add: 4",
    ]


def test_html_is_escaped_and_short() -> None:
    evil = "<script>alert('x')</script>&\""
    transcript = Transcript(
        [Prompt(evil), ToolOutput(evil, evil), ToolCalls([ToolCall(evil, {evil: evil})]), Response("y" * 10_000)]
    )
    page = transcript._repr_html_()
    assert "<script" not in page and page.count("&lt;script&gt;") == 6
    assert "y" * 4000 in page and "y" * 4001 not in page and "6,000 characters more" in page


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_breaks_out_of_the_html(text: str) -> None:
    page = Transcript([ToolOutput(text, text)])._repr_html_()
    empty = Transcript([ToolOutput("", "")])._repr_html_()
    assert page.count("<") == empty.count("<") and page.count('"') == empty.count('"')


def test_it_goes_when_nobody_holds_it() -> None:
    gc.disable()
    try:
        transcript = Transcript.from_json_dict(a_document())
        with transcript.busy():
            pass
        gone = weakref.ref(transcript)
        del transcript
        assert gone() is None
    finally:
        gc.enable()
