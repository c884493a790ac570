"""A conversation of `chat`, without its terminal: saved and loaded, taken back, told what went wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchard.cli import chat
from orchard.cli.conversation import MOST_BYTES, Conversation
from orchard.core.errors import BadFile, UsageError
from orchard.session.errors import TranscriptError
from tests.cli.conversing import on_small, said, scripted


def test_a_conversation_is_saved_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = scripted("é", system="be brief")
    chat.take_turn(first, "ü\n", 9)
    path = tmp_path / "new" / "a b.json"
    assert first.command(f"/save {path}")
    second = scripted("ok")
    assert second.command(f"/load {path}")
    assert said(second) == said(first) == [("Instructions", "be brief"), ("PromptEntry", "ü\n"), ("Response", "é")]
    assert second.command(f"/save {path}")  # over a conversation, but over nothing else
    second.command("/reset")
    assert said(second) == [("Instructions", "be brief")]
    second.command("/system be long")
    assert said(second) == [("Instructions", "be long")]
    second.command("/system")
    assert said(second) == []
    for line in ("/help", "/nonsense", "/save", "/tools", "/usage", "/undo"):
        assert second.command(line)
    assert not second.command("/exit")
    err = capsys.readouterr().err
    assert "there is no command /nonsense" in err and "no tools" in err and "nothing to take back" in err


def test_other_files_that_hold_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    wanted = [("Instructions", "be brief"), ("PromptEntry", "a")]
    path = tmp_path / "x.json"
    for document in (messages, {"messages": messages}):
        path.write_text(json.dumps(document))
        loaded = scripted()
        loaded.load(path)
        assert said(loaded) == wanted
    loaded.transcript.save(path)  # Apple's form
    again = scripted()
    again.load(path)
    assert said(again) == wanted
    path.write_text('{"type": "FoundationModels.Transcript", "version": 9}')
    with pytest.raises(TranscriptError):
        again.load(path)
    assert said(again) == wanted


def test_undo_usage_and_tools(capsys: pytest.CaptureFixture[str]) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    talk = scripted("one", "two", tools=[weather], system="be brief")
    chat.take_turn(talk, "first", 9)
    chat.take_turn(talk, "second", 9)
    talk.command("/undo")
    assert [text for _, text in said(talk)][1:] == ["first", "one"]
    talk.command("/tools")
    talk.command("/usage")
    err = capsys.readouterr().err
    assert "taken back: second" in err and "weather: The weather in a city" in err and "of 4,096 tokens" in err
    talk.command("/system be long")  # the tools that the transcript tells of stay in it
    assert talk.transcript[0].tools  # type: ignore[union-attr]
    talk.command("/undo")
    talk.command("/undo")
    assert len(talk.transcript) == 1 and "nothing to take back" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b"{}",
        b'"text"',
        b"[1]",
        b'[{"role": "user"}]',
        b'[{"role": "root", "content": "x"}]',
        b'[{"role": "user", "content": "\\ud800"}]',
        b"[" + b" " * MOST_BYTES + b"]",
    ],
    ids=range(11),
)
def test_a_damaged_conversation_changes_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    conversation = scripted(system="keep")
    with pytest.raises(BadFile) as caught:
        conversation.load(tmp_path / "x.json")
    assert "\n" not in caught.value.message
    assert said(conversation) == [("Instructions", "keep")]
    with pytest.raises(BadFile):
        conversation.load(tmp_path / "missing.json")
    with pytest.raises(BadFile, match="not a file"):
        conversation.load(tmp_path)
    with pytest.raises(BadFile, match="not a file"):
        conversation.load(Path(os.devnull))
    with pytest.raises(BadFile):
        conversation.save(tmp_path / "x.json" / "below a file")
    with pytest.raises(BadFile, match="no saved conversation"):  # somebody's file is not written over
        conversation.save(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_bytes() == content
    with pytest.raises(UsageError):
        conversation.command("/save ~nobody-of-that-name/x")


def test_a_failed_turn_is_taken_back(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["x" * 1000, "/load /nowhere", "/fail", "hello", ""])
    command = Conversation.command

    def failing(self: Conversation, line: str) -> bool:
        if line == "/fail":
            raise RuntimeError("a fault of ours")
        return command(self, line)

    monkeypatch.setattr(Conversation, "command", failing)

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat, "_ask", typed)
    conversation = on_small(small, max_tokens=4)
    chat.converse(conversation, 4)
    assert [name for name, _ in said(conversation)] == ["PromptEntry", "Response"]
    assert conversation.transcript[0].text == "hello"
    err = capsys.readouterr().err
    assert err.count("error: ") == 3 and "Traceback" not in err


def test_a_tool_that_fails_is_told_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    from orchard.testing import ToolCall

    def broken(city: str) -> str:
        """Fails."""
        raise RuntimeError("no luck")

    talk = scripted(ToolCall("broken", {"city": "Oslo"}), "Sorry.", tools=[broken])
    chat.take_turn(talk, "Weather?", 9)
    out, err = capsys.readouterr()
    assert out == "Sorry.\n" and "warning: the tool 'broken' failed: no luck" in err


def test_an_overflow_in_a_conversation_says_what_to_do(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["x" * 1000, "hello", "y" * 200, "/reset", "z"])
    conversation = on_small(small, max_tokens=40)
    monkeypatch.setattr(chat, "_ask", lambda prompt: next(typed, None) or _leave())
    chat.converse(conversation, 40)
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hint: ")]
    assert "shorten the message by at least" in first and "/reset" not in first
    assert "/save FILE keeps this conversation, /reset forgets it" in second
    assert [name for name, _ in said(conversation)] == ["PromptEntry", "Response"]


def _leave() -> str:
    raise EOFError


def test_a_line_that_is_no_text_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter([b"\xff", b"/nonsense"])
    monkeypatch.setattr(chat, "_ask", lambda prompt: next(lines, b"/exit").decode())
    conversation = scripted(system="keep")
    chat.converse(conversation, 9)
    err = capsys.readouterr().err
    assert "not UTF-8" in err and "no command /nonsense" in err and "space in front" in err
    assert said(conversation) == [("Instructions", "keep")]
