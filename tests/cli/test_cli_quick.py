"""The quick reading of `orchard respond` and typer's: where the first gives an answer, it is the second's."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cli import quick, verbs
from orchard.cli.answer import respond_to
from orchard.cli.respond import respond

OPTIONS = [*quick.VALUES, *quick.FLAGS, "--nope", "-x", "--", "--help", "-mname", "--top-k=3", "--model=x", "--no-json"]
VALUES = ["1", "0", "12", "0.5", "1.0", "2", "007", "1e3", "-1", "+4", " 5", "9" * 12, "x", "", "-", "nan", "1_0", "٣"]
words = st.one_of(st.sampled_from(OPTIONS), st.sampled_from(VALUES), st.text(max_size=6))
pairs = st.tuples(st.sampled_from(list(quick.VALUES)), st.sampled_from(VALUES)).map(list)
parts = st.lists(st.one_of(words.map(lambda word: [word]), pairs), max_size=5)
lines = parts.map(lambda lists: [word for part in lists for word in part])


def typed(line: list[str]) -> dict[str, Any] | None:
    """What typer makes of a command line: the arguments that reach `respond_to`, or None for a refusal."""
    heard: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "orchard.cli.respond.respond_to", lambda prompt, **named: heard.append({"prompt": prompt, **named})
        )
        patch.setattr("orchard.cli.respond.respond_in_session", lambda prompt, **named: pytest.fail("a session"))
        try:
            verbs.app(args=["respond", *line], standalone_mode=False)
        except Exception:
            return None
    return heard[0] if heard else None


def bound(named: dict[str, Any]) -> dict[str, Any]:
    arguments = inspect.signature(respond_to).bind(**named)
    arguments.apply_defaults()
    found = dict(arguments.arguments)
    return found | {"stop": found["stop"] or None}


@settings(max_examples=150)
@given(line=lines)
def test_both_readings_agree(line: list[str]) -> None:
    understood = quick.parse(["respond", *line])
    if understood is None:
        return
    expected = typed(line)
    assert expected is not None, "typer refuses what the quick reading accepts"
    assert bound(understood) == bound(expected)


def test_defaults_are_the_same() -> None:
    """What the quick reading does not know (a schema, tools …) is off unless it is asked for."""
    ours, theirs = (inspect.signature(function).parameters for function in (respond_to, respond))
    assert {name: p.default for name, p in ours.items()} == {name: theirs[name].default for name in ours}
    assert all(theirs[name].default in (None, False) for name in theirs.keys() - ours.keys())
    known = {name for name, _ in quick.VALUES.values()} | set(quick.FLAGS.values()) | {"prompt"}
    assert known == set(ours)


def test_what_people_write_is_understood() -> None:
    assert quick.parse(["respond", "Why?"]) == {"prompt": "Why?"}
    assert quick.parse(["respond"]) == {}
    assert quick.parse(["respond", "-", "--json"]) == {"prompt": "-", "as_json": True}
    line = ["respond", "--max-tokens", "5", "Why?", "-m", "x", "--stop", "a", "--stop", "b", "--top-p", "0.9"]
    wanted = {"prompt": "Why?", "max_tokens": 5, "model": "x", "stop": ["a", "b"], "top_p": 0.9}
    assert quick.parse(line) == wanted


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["chat"],
        ["--help"],
        ["respond", "a", "b"],
        ["respond", "--help"],
        ["respond", "a", "--max-tokens"],
        ["respond", "a", "--max-tokens", "0"],
        ["respond", "a", "--top-p", "1.5"],
        ["respond", "a", "--seed", "1", "--seed", "2"],
        ["respond", "--", "-a"],
        ["respond", "a", "--schema", "b.json"],
        ["respond", "a", "--choices", "b,c"],
        ["respond", "a", "--regex", "b"],
        ["respond", "a", "--tool", "b:c"],
        ["respond", "a", "--adapter", "b"],
        ["respond", "a", "--guardrails", "strict"],
        ["respond", "a", "--no-guardrails"],
    ],
)
def test_everything_else_is_typers(line: list[str]) -> None:
    assert quick.parse(line) is None


def test_the_variable_is_typers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHARD_OFFLINE", "1")
    assert quick.parse(["respond", "a"]) is None


def test_a_plain_respond_imports_no_parser() -> None:
    code = (
        "import sys; from orchard.cli.main import main; main(['respond', 'hi', '--model', 'no-such-model'])\n"
        "print([name for name in ('typer', 'pydantic', 'rich', 'numpy', 'torch', 'llguidance') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]" and "no model called" in done.stderr
