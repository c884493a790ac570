"""What a person thought of an answer, as a file to attach to a report: the transcript, a sentiment, issues, and what was wanted.

Sentiments and the eight categories are those of Swift's `LanguageModelFeedback`. Apple documents what goes into its file but
not its form, so the form here is Orchard's own, versioned. Nothing is sent anywhere: these are bytes, and whoever asked for
them decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen
from orchard.session.transcript import Response, StructureSegment, Transcript
from orchard.session.transcript.entries import ENTRIES, Entry, json_copy
from orchard.session.transcript.wire import AROUND, write_entry

VERSION = 1
KIND = "Orchard.Feedback"


class Sentiment(StrEnum):
    POSITIVE = "positive"
    NEUTRAL = "neutral"
    NEGATIVE = "negative"


class IssueCategory(StrEnum):
    """What can be wrong with an answer."""

    UNHELPFUL = "unhelpful"
    TOO_VERBOSE = "tooVerbose"
    DID_NOT_FOLLOW_INSTRUCTIONS = "didNotFollowInstructions"
    INCORRECT = "incorrect"
    STEREOTYPE_OR_BIAS = "stereotypeOrBias"
    SUGGESTIVE_OR_SEXUAL = "suggestiveOrSexual"
    VULGAR_OR_OFFENSIVE = "vulgarOrOffensive"
    TRIGGERED_GUARDRAIL_UNEXPECTEDLY = "triggeredGuardrailUnexpectedly"


@frozen
class Issue:
    """One thing that is wrong, and why. A category may be given by name: "tooVerbose" or "too_verbose"."""

    category: IssueCategory
    explanation: str | None = None

    def __post_init__(self) -> None:
        self.__dict__["category"] = _member(IssueCategory, self.category, "issue category")
        if not isinstance(self.explanation, str | None):
            wrong = f"the explanation of an issue is a {type(self.explanation).__name__}"
            raise UsageError(wrong, hint="explain in words, or leave it out")

    def to_dict(self) -> dict[str, str]:
        explained = {} if self.explanation is None else {"explanation": self.explanation}
        return {"category": self.category.value, **explained}


def feedback_attachment(
    transcript: Transcript,
    sentiment: Sentiment | str | None = None,
    issues: Iterable[Issue | IssueCategory | str] = (),
    desired_output: Entry | str | Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """A JSON document in UTF-8. `desired_output` is what the answer should have been: a text, the JSON of a typed answer,
    or an entry. `details` is any JSON that helps whoever reads it (options, versions, a request's id)."""
    if isinstance(issues, str | Mapping | Issue) or not isinstance(issues, Iterable):
        raise UsageError("issues are not a list", hint='give a list, such as [Issue("incorrect", "It is 42.")]')
    listed = [issue if isinstance(issue, Issue) else Issue(issue) for issue in issues]  # type: ignore[arg-type]
    desired = _desired(desired_output)
    document: dict[str, Any] = {
        "version": VERSION,
        "type": KIND,
        "sentiment": None if sentiment is None else _member(Sentiment, sentiment, "sentiment").value,
        "issues": [issue.to_dict() for issue in listed],
        "desiredOutput": None if desired is None else write_entry(desired),
        "model": model,
        "details": dict(details or {}),
        "transcript": transcript.to_json_dict(),
    }
    return json.dumps(json_copy(document, "the feedback", depth=-2 * AROUND), ensure_ascii=False, indent=2).encode()


attachment = feedback_attachment


def _desired(wanted: Any) -> Entry | None:
    if wanted is None or isinstance(wanted, ENTRIES):
        return wanted
    if isinstance(wanted, str):
        return Response(wanted)
    if isinstance(wanted, Mapping):
        return Response(StructureSegment("DesiredOutput", wanted))
    wrong = f"a {type(wanted).__name__} is no desired output"
    raise UsageError(wrong, hint="give a text, the JSON of a typed answer, or an entry of a transcript")


def _member(kind: type[StrEnum], value: Any, named: str) -> Any:
    """A member from itself, its value, or its name in any case."""
    for member in kind:
        if isinstance(value, str) and value in (member.value, member.name, member.name.lower()):
            return member
    raise UsageError(f"{value!r} is no {named}", hint=f"use one of {', '.join(kind)}")
