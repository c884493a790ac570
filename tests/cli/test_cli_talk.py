"""`respond`, and `chat` in pipes: a small random model through the project's own parts."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchard.cli.main import main
from tests.cli.conversing import PROGRAM
from tests.tiny import CONTEXT


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


@pytest.mark.real
def test_the_default_model_answers(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Paris" in answer(capsys, "What is the capital of France?", "--max-tokens", "16")
