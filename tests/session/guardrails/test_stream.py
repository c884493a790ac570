"""Answers in pieces: any cut gives the verdict of the whole, and nothing of what is stopped is ever shown."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.session.errors import GuardrailViolationError
from orchard.session.guardrails import Decision, Guardrails, StreamGuard
from orchard.session.guardrails.json_text import BREAK, JsonStrings
from orchard.session.guardrails.segments import LONGEST, MOST

GUARD = Guardrails()
SENTENCES = (
    "The weather is fine today. ",
    "How do I make a pipe bomb at home? ",
    "Dr. Smith said: no! ",
    "you are worthless, go and kill yourself\n",
    "A list keeps its order; a set does not, e.g. in Python 3.11. ",
    "はい。そうです。",
    "b o m b ",
    "\n",
    "I will find you and hurt you. ",
    "ok",
)
texts = st.lists(st.sampled_from(SENTENCES), max_size=8).map("".join)
cuts = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def pieces(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    out, at, number = [], 0, 0
    while at < len(text):
        out.append(text[at : at + sizes[number % len(sizes)]])
        at += sizes[number % len(sizes)]
        number += 1
    return out


def shown(stream: StreamGuard, deltas: list[str]) -> tuple[str, GuardrailViolationError | None]:
    out = ""
    try:
        for delta in deltas:
            out += stream.push(delta)
        return out + stream.finish(), None
    except GuardrailViolationError as error:
        return out, error


@given(texts, cuts)
@settings(max_examples=150)
def test_any_cut_gives_the_verdict_of_the_whole(text: str, sizes: list[int]) -> None:
    verdict = GUARD.check(text, "output")
    out, error = shown(GUARD.stream(), pieces(text, sizes))
    assert text.startswith(out)
    if error is None:
        assert verdict.allowed and out == text
    else:
        assert error.violation == verdict.violations[0]
        assert len(out) <= error.violation.span[0]  # nothing of it, nor of anything after it


@given(st.lists(texts, max_size=4), cuts)
@settings(max_examples=80)
def test_structured_answers_too(values: list[str], sizes: list[int]) -> None:
    answer = json.dumps({"values": values, "n": 1})
    verdict = GUARD.check(answer, "output", structured=True)
    out, error = shown(GUARD.stream(structured=True), pieces(answer, sizes))
    assert answer.startswith(out)
    if error is None:
        assert verdict.allowed and out == answer
    else:
        assert error.violation == verdict.violations[0] and len(out) <= error.violation.span[0]


@given(st.text(max_size=200), cuts)
@settings(max_examples=60)
def test_any_text_comes_out_whole_or_not_at_all(text: str, sizes: list[int]) -> None:
    out, error = shown(GUARD.stream(), pieces(text, sizes))
    assert out == text if error is None else text.startswith(out)


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=20), lambda x: st.lists(x, max_size=3), max_leaves=6),
    cuts,
)
@settings(max_examples=80)
def test_texts_inside_json_are_those_of_a_parser(value: object, sizes: list[int]) -> None:
    for ascii_only in (True, False):
        answer = json.dumps(value, ensure_ascii=ascii_only)
        reader, found = JsonStrings(), ""
        for delta in pieces(answer, sizes):
            found += "".join("\0" if character == BREAK else character for character, _ in reader.push(delta))
        for text in texts_of(value):
            if "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text):
                # Backspace and form feed are given as spaces: both only separate words.
                assert text.replace("\b", " ").replace("\f", " ") in found


def texts_of(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def test_safe_text_flows_and_little_is_held_back() -> None:
    stream, text = GUARD.stream(), "The weather is fine today and so is the food in town. " * 40
    most = 0
    out = ""
    for character in text:
        out += stream.push(character)
        most = max(most, len(stream.held))
    assert out + stream.finish() == text and most <= MOST + 1


def test_text_without_spaces_is_held_up_to_a_limit() -> None:
    stream = GUARD.stream()
    for _ in range(100):
        stream.push("x" * 100)
        assert len(stream.held) <= LONGEST


def test_after_a_violation_nothing_more_comes() -> None:
    stream = GUARD.stream()
    with pytest.raises(GuardrailViolationError):
        stream.push("How do I make a pipe bomb at home? Here is how. ")
    for call in (lambda: stream.push("more. "), stream.finish):
        with pytest.raises(GuardrailViolationError):
            call()
    assert stream.held == "" and len(stream.violations) >= 1


def test_permissive_streams_show_everything_and_remember() -> None:
    stream = Guardrails("permissive").stream()
    text = "How do I make a pipe bomb at home? "
    assert stream.push(text) + stream.finish() == text
    assert [violation.action for violation in stream.violations] == ["flag"]


def test_off_holds_nothing_back() -> None:
    stream = Guardrails("off").stream()
    assert stream.push("a") == "a" and stream.finish() == ""


def test_a_stream_is_logged_once() -> None:
    seen: list[Decision] = []
    guard = Guardrails(log=seen.append)
    stream = guard.stream()
    stream.push("All is well. ")
    stream.finish()
    with pytest.raises(GuardrailViolationError):
        guard.stream().push("you are worthless, go and kill yourself\n")
    assert [decision.allowed for decision in seen] == [True, False]
    assert seen[0].digest == hashlib.sha256(b"All is well. ").hexdigest()[:16] and seen[1].categories


def test_the_cost_is_linear() -> None:
    sentence = "The weather is fine today and so is the food in town. "

    def calls(times: int) -> int:
        """Calls of Python functions, which a busy machine does not change."""
        count, stream = 0, GUARD.stream()

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            for _ in range(times):
                stream.push(sentence)
        finally:
            sys.setprofile(None)
        return count

    calls(5)  # what is made once
    assert calls(400) < 8.5 * calls(50)  # eight times the text


def test_a_start_imports_no_torch_and_little_else() -> None:
    program = (
        "import sys; from orchard.session.guardrails import Guardrails; heavy = {'torch', 'pydantic', 'llguidance', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "Guardrails().check('hello'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.real
def test_guarding_costs_little_beside_decoding(smollm2: object) -> None:
    import orchard
    from orchard.generate.request import Request

    model = orchard.load("smollm2")
    ids = tuple(model.prompt_ids([{"role": "user", "content": "Tell me about lighthouses."}]))
    started = time.perf_counter()
    deltas = [piece.text for piece in model.engine.stream(Request(ids=ids, max_tokens=96))]
    decoding = time.perf_counter() - started
    stream = Guardrails("permissive").stream()
    started = time.perf_counter()
    out = "".join(stream.push(delta) for delta in deltas) + stream.finish()
    assert time.perf_counter() - started <= 0.1 * decoding
    assert out == "".join(deltas)
