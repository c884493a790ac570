"""Feedback attachments: plain JSON bytes that hold what a report needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.session.errors import TranscriptError
from orchard.session.feedback import Issue, IssueCategory, Sentiment, attachment, feedback_attachment
from orchard.session.transcript import Prompt, Response, StructureSegment, Transcript
from tests.session.transcript.documents import a_document

TALK = Transcript([Prompt("What is 6 times 7?"), Response("41")])


def test_names_are_those_of_the_swift_framework() -> None:
    assert {each.value for each in IssueCategory} == {
        "unhelpful",
        "tooVerbose",
        "didNotFollowInstructions",
        "incorrect",
        "stereotypeOrBias",
        "suggestiveOrSexual",
        "vulgarOrOffensive",
        "triggeredGuardrailUnexpectedly",
    }
    assert [each.value for each in Sentiment] == ["positive", "neutral", "negative"]


def test_everything_in_one_document() -> None:
    issues = [Issue(IssueCategory.INCORRECT, "It is 42 ❤."), "too_verbose", IssueCategory.UNHELPFUL]
    details = {"options": {"temperature": 0.5}}
    data = feedback_attachment(TALK, Sentiment.NEGATIVE, issues, "42", model="smollm2", details=details)
    document = json.loads(data)
    assert (document["version"], document["type"], document["sentiment"]) == (1, "Orchard.Feedback", "negative")
    assert document["issues"] == [
        {"category": "incorrect", "explanation": "It is 42 ❤."},
        {"category": "tooVerbose"},
        {"category": "unhelpful"},
    ]
    assert document["desiredOutput"]["role"] == "response"
    assert document["desiredOutput"]["contents"][0]["text"] == "42"
    assert document["model"] == "smollm2" and document["details"] == details
    assert Transcript.from_json_dict(document["transcript"]) == TALK
    assert attachment is feedback_attachment and "❤" in data.decode()


def test_the_least() -> None:
    document = json.loads(feedback_attachment(Transcript.from_json_dict(a_document())))
    assert document["sentiment"] is document["desiredOutput"] is document["model"] is None
    assert document["issues"] == [] and document["transcript"] == a_document()


def test_desired_outputs() -> None:
    typed = json.loads(feedback_attachment(TALK, "positive", desired_output={"value": 42}))["desiredOutput"]
    assert typed["contents"][0]["structure"]["content"] == {"value": 42}
    entry = Response([StructureSegment("Answer", {"value": 42})], id="mine")
    assert json.loads(feedback_attachment(TALK, desired_output=entry))["desiredOutput"]["id"] == "mine"
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    feedback_attachment(Transcript([Response(StructureSegment("Deep", deep))]), desired_output={"deep": deep})


@pytest.mark.parametrize("name", ["tooVerbose", "TOO_VERBOSE", "too_verbose", IssueCategory.TOO_VERBOSE])
def test_categories_by_name(name: Any) -> None:
    assert Issue(name).category is IssueCategory.TOO_VERBOSE and Issue(name) == Issue(IssueCategory.TOO_VERBOSE)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sentiment": "angry"}, "'angry' is no sentiment"),
        ({"sentiment": 1}, "1 is no sentiment"),
        ({"issues": ["boring"]}, "'boring' is no issue category"),
        ({"issues": "incorrect"}, "not a list"),
        ({"issues": Issue("incorrect")}, "not a list"),  # type: ignore[arg-type]
        ({"issues": 5}, "not a list"),
        ({"desired_output": 42}, "a int is no desired output"),
    ],
)
def test_misuse(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        feedback_attachment(TALK, **arguments)
    assert caught.value.hint


def test_what_is_no_json() -> None:
    with pytest.raises(TranscriptError, match=r"details\.at"):
        feedback_attachment(TALK, details={"at": object()})
    with pytest.raises(UsageError, match="explanation"):
        Issue("incorrect", 5)  # type: ignore[arg-type]
