"""`respond` and `chat`: a small random model through the project's own parts, in pipes and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchard.cli import chat
from orchard.cli.conversation import MOST_BYTES, Conversation, Setup
from orchard.cli.main import main
from orchard.core.errors import BadFile, UsageError
from orchard.session.errors import TranscriptError
from orchard.testing import ScriptedModel
from tests.tiny import CONTEXT, tiny_gguf

PROGRAM = [sys.executable, "-c", "from orchard.cli.main import run; run()"]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer and random weights, whose tokens are bytes."""
    return tiny_gguf(tmp_path_factory.mktemp("model") / "small.gguf")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["respond", *arguments]) == code
    return capsys.readouterr().out


def test_respond_streams_what_json_tells(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(small), "--max-tokens", "12"]
    text = answer(capsys, "hello", *common)
    facts = json.loads(answer(capsys, "hello", *common, "--json"))
    assert set(facts) == {"text", "ids", "finish", "usage", "seed", "model"}
    assert text == facts["text"] + "\n"
    assert facts["finish"] == "length" and len(facts["ids"]) == 12 == facts["usage"]["output"]
    assert facts["model"] == str(small)
    with_system = json.loads(answer(capsys, "hello", *common, "--json", "--system", "be brief"))
    assert with_system["usage"]["input"] > facts["usage"]["input"]


def test_sampling_options_reach_the_model(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["hello", "--model", str(small), "--max-tokens", "12", "--json", "--offline"]
    sampled = [*common, "--temperature", "1.5", "--top-k", "50", "--top-p", "0.99", "--min-p", "0.001"]
    first, second = (json.loads(answer(capsys, *sampled, "--seed", "7")) for _ in range(2))
    other = json.loads(answer(capsys, *sampled, "--seed", "8"))
    assert first == second and first["seed"] == 7 and first["text"] != other["text"]
    greedy = json.loads(answer(capsys, *common))
    penalised = json.loads(answer(capsys, *common, "--repetition-penalty", "5"))
    assert penalised["ids"] != greedy["ids"]
    stopped = json.loads(answer(capsys, *common, "--stop", greedy["text"][4:6]))
    assert stopped["finish"] == "stop" and greedy["text"].startswith(stopped["text"])
    assert greedy["text"][4:6] not in stopped["text"]


class Input:
    """Standard input that is no terminal."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("verb", [["respond"], ["respond", "-"], ["chat"]])
def test_standard_input_is_one_prompt(
    verb: list[str], small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--model", str(small), "--max-tokens", "6"]
    expected = answer(capsys, "two\nlines", *common)
    monkeypatch.setattr(sys, "stdin", Input(b"two\nlines\n"))
    assert main([*verb, *common]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"caf\xe9 au lait", "0xe9 at offset 3"), (b"\xff\xfeh\x00", "offset 0")],
)
@pytest.mark.parametrize("verb", ["respond", "chat"])
def test_bad_input_is_wrong_usage(
    verb: str, data: bytes, says: str, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Input(data))
    assert main([verb, "--model", str(small)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err.splitlines()[0] and err.splitlines()[1].startswith("hint: ")


def test_an_empty_prompt_or_none_is_wrong_usage(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["respond", "", "--model", str(small)]) == 2
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["respond", "--model", str(small)]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_too_long_a_prompt_is_told_with_its_counts(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["respond", "x" * 1000, "--model", str(small)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"holds {CONTEXT}" in err and "hint: shorten the prompt by at least" in err


def test_interrupting_respond_keeps_what_was_written(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Enough tokens to be in the middle of them when the signal comes."""
    arguments = ["hello", "--model", str(small), "--max-tokens", "200"]
    whole = answer(capsys, *arguments).encode()
    command = [*PROGRAM, "respond", *arguments]
    slowed = (
        "import orchard.cli.common as c, time; p = c.printable; c.printable = lambda t: (time.sleep(0.05), p(t))[1]\n"
    )
    command[2] = slowed + command[2]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    first = program.stdout.read(3)
    program.send_signal(signal.SIGINT)
    rest, errors = program.communicate(timeout=30)
    assert program.returncode == 130 and errors == b""
    written = (first + rest).removesuffix(b"\n")
    assert whole.startswith(written) and len(written) < len(whole) - 1


# The conversation ----------------------------------------------------------------------------------------------------


def scripted(*answers: object, system: str | None = None, **named: object) -> Conversation:
    return Conversation(Setup(ScriptedModel(list(answers)), **named), system)  # type: ignore[arg-type]


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(type(entry).__name__, entry.text) for entry in conversation.transcript]


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


def on_small(small: Path, max_tokens: int) -> Conversation:
    import orchard
    from orchard.session.options import GenerationOptions

    options = GenerationOptions(maximum_response_tokens=max_tokens)
    return Conversation(Setup(orchard.load(small), options, guardrails=None))


def test_a_tool_that_fails_is_told_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    from orchard.testing import ToolCall

    def broken(city: str) -> str:
        """Fails."""
        raise RuntimeError("no luck")

    talk = scripted(ToolCall("broken", {"city": "Oslo"}), "Sorry.", tools=[broken])
    chat.take_turn(talk, "Weather?", 9)
    out, err = capsys.readouterr()
    assert out == "Sorry.\n" and "warning: the tool 'broken' failed: no luck" in err


def in_terminal(
    command: Sequence[str], steps: Sequence[tuple[str, bytes]], environment: dict[str, str], term: str = "dumb"
) -> tuple[str, int]:
    """Run a program in a terminal of its own: wait for a pattern, type something, and so on."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], list(command), environment | {"TERM": term, "COLUMNS": "80"})
    shown, mark, left = "", 0, list(steps)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                break
            shown += data.decode(errors="replace")
        if left and re.search(left[0][0], shown[mark:], flags=re.DOTALL):
            mark = len(shown)
            time.sleep(0.1)  # a key between the prompt and the reading of it can be lost to the line editor
            os.write(terminal, left.pop(0)[1])
    else:
        os.kill(child, signal.SIGKILL)
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saved_entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(path.read_text())["transcript"]["transcript"]["entries"]
    return entries


def text_of(entry: dict[str, Any]) -> str:
    return "".join(content["text"] for content in entry["contents"])


def test_chat_in_a_terminal(small: Path, empty_home: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    slowed = (
        "import orchard.cli.common as c, time; p = c.printable; c.printable = lambda t: (time.sleep(0.02), p(t))[1]\n"
    )
    # Guardrails would hold back what is no whole sentence, and this model writes none.
    command = [sys.executable, "-c", slowed + PROGRAM[2], "chat", "--model", str(small), "--no-guardrails"]
    steps = [
        ("> ", b"/help\n"),
        ("> ", b"hello\n"),
        ("hello\r\n...", b"\x03"),  # the echo, and the beginning of the answer
        ("> ", f"/save {saved}\n".encode()),
        ("> ", b"\x04"),
    ]
    shown, code = in_terminal(command, steps, dict(os.environ))
    assert code == 0, shown
    assert "/save FILE" in shown and "stopped" in shown and "Traceback" not in shown
    assert "\x1b" not in shown  # a dumb terminal would show escapes as they are
    asked, answered = saved_entries(saved)
    assert (asked["role"], text_of(asked), answered["role"]) == ("user", "hello", "response")
    assert 0 < len(text_of(answered)) < 150 and text_of(answered)[:3] in shown  # stopped, and kept
    assert "/save" in (empty_home / "chat_history").read_text()


def test_lines_pasted_together_are_one_message(small: Path, empty_home: Path, tmp_path: Path) -> None:
    """And a line with a space in front is no command; what was typed is added to the history of earlier days."""
    (empty_home / "chat_history").write_text("earlier\n")
    command = [*PROGRAM, "chat", "--model", str(small), "--max-tokens", "4"]
    steps = [
        ("> ", b"\x1b[200~one\ntwo\x1b[201~\r"),
        ("two.*> ", b" /etc/hosts\r"),
        ("hosts.*> ", f"/save {tmp_path / 'talk.json'}\r".encode()),
        ("saved.*> ", b"\x04"),
    ]
    shown, code = in_terminal(command, steps, dict(os.environ), term="xterm")
    assert code == 0, shown
    asked = saved_entries(tmp_path / "talk.json")[::2]
    assert [text_of(entry) for entry in asked] == ["one\ntwo", "/etc/hosts"]
    assert "\x1b[?2004h" in shown  # the terminal is asked to mark what is pasted
    assert "loading" in shown and "cut after 4 tokens" in shown
    lines = (empty_home / "chat_history").read_text().splitlines()
    assert lines[:3] == ["earlier", "one", "two"] and lines[3:4] == [" /etc/hosts"]


def test_two_conversations_at_once_keep_both_histories(empty_home: Path) -> None:
    path = empty_home / "chat_history"
    path.write_text("earlier\n")
    program = (
        "import readline, sys; from orchard.cli.chat import _history\n"
        "with _history():\n"
        "    readline.add_history('first')\n"
        "    open(sys.argv[1], 'a').write('second\\n')  # another one ends meanwhile\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert path.read_text().split() == ["earlier", "second", "first"]


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


def test_ctrl_c_at_the_prompt_leaves(small: Path, empty_home: Path) -> None:
    command = [*PROGRAM, "chat", "--model", str(small)]
    shown, code = in_terminal(command, [("> ", b"\x03")], dict(os.environ))
    assert code == 0 and "Traceback" not in shown


def test_a_conversation_is_resumed(small: Path, empty_home: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    before = on_small(small, 4)
    chat.take_turn(before, "earlier", 4)
    before.save(saved)
    command = [*PROGRAM, "chat", "--model", str(small), "--max-tokens", "4", "--resume", str(saved), "--no-guardrails"]
    steps = [("> ", b"later\n"), ("> ", f"/save {saved}\n".encode()), ("saved 2 turns.*> ", b"\x04")]
    shown, code = in_terminal(command, steps, dict(os.environ))
    assert code == 0, shown
    assert [text_of(entry) for entry in saved_entries(saved)[::2]] == ["earlier", "later"]
    shown, code = in_terminal(
        [*PROGRAM, "chat", "--model", str(small), "--resume", "nothing.json"], [], dict(os.environ)
    )
    assert code == 2 and "error: --resume: there is no file nothing.json" in shown and "hint: " in shown


def test_chat_without_the_model_names_the_command(empty_home: Path) -> None:
    shown, code = in_terminal([*PROGRAM, "chat"], [], dict(os.environ))
    assert code == 2 and "orchard pull smollm2" in shown


@pytest.mark.real
def test_the_default_model_answers(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Paris" in answer(capsys, "What is the capital of France?", "--max-tokens", "16")
