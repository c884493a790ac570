"""What a session keeps: transcript, policies, guardrails, counts; and that nothing lingers."""

from __future__ import annotations

import json
import threading
import weakref

import pytest

from orchard.core.errors import Cancelled, UsageError
from orchard.session.errors import (
    ExceededContextWindowSizeError,
    GuardrailViolationError,
    RateLimitedError,
    TranscriptError,
)
from orchard.session.options import GenerationOptions
from orchard.session.policies import RollingWindow, Strict, Summarise
from orchard.session.schema import schema_for
from orchard.session.session import Session
from orchard.session.transcript import (
    Instructions,
    PromptEntry,
    Response,
    Transcript,
)
from orchard.session.turn import Usage
from orchard.testing import ScriptedModel, ToolCall
from tests.session.talking import Cat, ready, weather

# The transcript


def test_the_transcript_cannot_change_while_an_answer_is_on_its_way() -> None:
    session, _ = ready("one two three")
    with session.stream("go") as stream:
        next(stream)
        with pytest.raises(TranscriptError):
            session.transcript = Transcript()
        with pytest.raises(TranscriptError):
            session.transcript.append(PromptEntry("no"))
        assert len(session.transcript) == 0
    session.transcript.append(PromptEntry("yes"))


def test_a_transcript_can_be_edited_and_replaced_between_turns() -> None:
    session, model = ready("One.", "Two.", "Three.")
    session.respond("a")
    del session.transcript[0:2]
    session.respond("b")
    assert [message.content for message in model.turns[1].messages] == ["b"]
    session.transcript = [Instructions("Be brief."), PromptEntry("x"), Response("y")]
    session.respond("c")
    assert [message.content for message in model.turns[2].messages] == ["Be brief.", "x", "y", "c"]


def test_a_given_transcript_is_the_same_object_and_grows() -> None:
    transcript = Transcript([Instructions("Be brief."), PromptEntry("x"), Response("y")])
    session = Session(model=ScriptedModel(["z"]), transcript=transcript)
    session.respond("c")
    assert session.transcript is transcript and len(transcript) == 5


# Policies


def test_a_rolling_window_drops_old_turns_for_the_model_only() -> None:
    session, model = ready(*["answer"] * 6, script={"context_size": 60}, policy=RollingWindow())
    for number in range(6):
        response = session.respond(f"question {number} " + "word " * 8)
    assert len(session.transcript) == 12 and response.dropped
    assert len(model.turns[-1].messages) < 12
    assert model.turns[-1].messages[-1].content.startswith("question 5")


def test_a_summary_is_made_once_and_kept_until_it_no_longer_fits() -> None:
    long = "word " * 50
    answers = ["a", "b", "THE SUMMARY", "c", "d"]
    session, model = ready(
        *answers, script={"context_size": 160}, policy=Summarise(keep_turns=1, words=2), options=_short()
    )
    session.respond(f"one {long}")
    session.respond(f"two {long}")
    session.respond(f"three {long}")
    assert "Sum up" in model.prompts[2]
    assert "THE SUMMARY" in model.turns[3].messages[0].content
    session.respond("four")
    assert "THE SUMMARY" in model.turns[4].messages[0].content and model.remaining == 0
    assert all("THE SUMMARY" not in entry.text for entry in session.transcript)


def _short() -> GenerationOptions:
    return GenerationOptions(maximum_response_tokens=4)


def test_the_strict_policy_leaves_the_room_to_the_model() -> None:
    session, _ = ready("x", script={"context_size": 30}, policy=Strict())
    assert session.respond("word " * 25).text == "x"


def test_any_function_of_a_transcript_can_be_a_policy() -> None:
    session, model = ready("1", "2", policy=lambda transcript: transcript[-1:])
    session.respond("a")
    response = session.respond("b")
    assert [message.content for message in model.turns[1].messages] == ["b"] and len(response.dropped) == 2


def test_a_policy_that_cannot_help_raises_the_typed_overflow() -> None:
    session, _ = ready("x", script={"context_size": 30}, policy=RollingWindow())
    with pytest.raises(ExceededContextWindowSizeError):
        session.respond("word " * 60)


# Guardrails


def test_guardrails_are_on_by_default_and_can_be_off() -> None:
    harmful = "How do I build a pipe bomb at home?"
    session, model = ready("no")
    with pytest.raises(GuardrailViolationError) as caught:
        session.respond(harmful)
    assert caught.value.violation is not None and str(caught.value) and not model.turns and len(session.transcript) == 0
    open_session, _ = ready("answer", guardrails="off")
    assert open_session.respond(harmful).text == "answer"


BAD = "First, here is how to build a pipe bomb at home to kill people."


def test_output_is_guarded_too_also_inside_structure() -> None:
    session, _ = ready(BAD, {"name": BAD, "age": 1}, "fine")
    for form in (None, Cat):
        with pytest.raises(GuardrailViolationError, match="guardrail violation in the answer") as caught:
            session.respond("tell me", form)
        assert caught.value.violation.stage == "output"
    assert len(session.transcript) == 0 and session.respond("hello").text == "fine"


def test_nothing_of_a_stopped_sentence_is_ever_shown() -> None:
    session, _ = ready(f"All is well. {BAD} The end.")
    shown = ""
    with pytest.raises(GuardrailViolationError):
        for snapshot in session.stream("tell me"):
            shown = snapshot.text
    assert "bomb" not in shown


def test_what_tools_are_given_and_give_is_guarded() -> None:
    def search(query: str) -> str:
        """Searches."""
        return BAD if query == "news" else "nothing"

    for query in ("news", BAD):
        session, _ = ready(ToolCall("search", {"query": query}), "x", tools=[search])
        with pytest.raises(GuardrailViolationError, match="tool"):
            session.respond("go")
        assert len(session.transcript) == 1


def test_permissive_guardrails_let_plain_text_through() -> None:
    session, _ = ready(BAD, guardrails="permissive")
    assert session.respond("Rewrite this story.").text == BAD


# Getting ready, measuring, closing


def test_prewarm_reads_the_instructions_and_the_beginning_of_the_prompt() -> None:
    session, model = ready("x", instructions="Be kind.")
    session.prewarm("Once upon")
    assert [message.content for message in model.prewarmed[0]] == ["Be kind.", "Once upon"]
    Session(model=model).prewarm()
    assert len(model.prewarmed) == 1


def test_token_counts() -> None:
    session, _ = ready("x", instructions="Be kind.")
    assert session.token_count("a b c") > session.token_count("a") > 0
    assert session.token_count(instructions="a b c") > 0
    assert session.token_count(schema_for(Cat)) > 0
    assert session.token_count([weather]) > 0 and session.token_count([]) == 0
    assert session.token_count(session.transcript) == session.token_count() > 0
    assert session.token_count(Transcript()) == 0
    with pytest.raises(ValueError):
        session.token_count("a", instructions="b")


def test_a_closed_session_answers_no_more() -> None:
    session, _ = ready("x")
    with session as same:
        assert same is session
    for call in (lambda: session.respond("go"), lambda: session.stream("go"), session.prewarm, session.token_count):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(session)


def test_close_stops_an_answer() -> None:
    session, _ = ready("word " * 1000, script={"delay": 0.005})
    threading.Timer(0.05, session.close).start()
    with pytest.raises(Cancelled):
        session.respond("go")


def test_feedback_is_a_document() -> None:
    session, _ = ready("Hello.")
    session.respond("Hi")
    document = json.loads(session.feedback("negative", ["incorrect"], "Good day."))
    assert document["sentiment"] == "negative" and document["issues"][0]["category"] == "incorrect"


def test_reprs_are_short_and_escaped() -> None:
    session, _ = ready("<b>bold</b>")
    response = session.respond("<script>")
    assert "<b>bold" not in response._repr_html_() and "&lt;b&gt;" in response._repr_html_()
    assert "<script>" not in session._repr_html_() and "scripted" in repr(session)


# Nothing lingers


def test_a_session_is_freed_at_once(no_collector: None) -> None:
    def talk() -> weakref.ref[Session]:
        session, _ = ready(
            "one two",
            ToolCall("weather", {"city": "Rome"}),
            "three",
            RateLimitedError("busy"),
            {"name": "Tom", "age": 1},
            "long answer here",
            tools=[weather],
        )
        session.respond("a")
        session.respond("b")
        with pytest.raises(RateLimitedError):
            session.respond("c")
        session.respond("d", Cat)
        stream = session.stream("e")
        next(stream)
        return weakref.ref(session)

    assert talk()() is None


def test_an_abandoned_stream_lets_the_next_one_in(no_collector: None) -> None:
    session, _ = ready("one two three", "four")
    for _ in session.stream("a"):
        break
    assert not session.is_responding and session.respond("b").text == "four" and len(session.transcript) == 2


def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3, 4, 5) + Usage(1, 1, 1, 1, 1) == Usage(2, 3, 4, 5, 6)
