"""`chat` in a terminal of its own: keys, history, and a conversation that goes on another day."""

from __future__ import annotations

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

from orchard.cli import chat
from tests.cli.conversing import PROGRAM, on_small


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
