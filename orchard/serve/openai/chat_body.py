"""The body of `POST /v1/chat/completions`, and the turns that it asks for.

Every field that OpenAI's own package can send is either obeyed, of no consequence here, refused by name, or named in the header
`x-orchard-ignored`; docs/server-openai.md lists which. So are the fields that vLLM and llama.cpp added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from orchard.serve.errors import ApiError, invalid
from orchard.serve.openai.chat_messages import ChatMessage, messages_of
from orchard.serve.openai.chat_tools import (
    ChoiceBody,
    FunctionBody,
    FunctionName,
    Offer,
    ToolBody,
    functions_of,
    tools_of,
)
from orchard.serve.openai.constraints import constraint_of
from orchard.serve.openai.fields import (
    MOST_TOKENS,
    Shared,
    bias_of,
    counted,
    limited,
    refuse_streaming_options,
    refused,
    sampling_of,
    seed_of,
    stops_of,
)
from orchard.serve.settings import Limits
from orchard.session.turn import Turn

MOST_LOGPROBS = 20
EFFORTS = {
    "none": "none",
    "minimal": "light",
    "low": "light",
    "medium": "moderate",
    "high": "deep",
    "xhigh": "deep",
    "max": "deep",
}
"""OpenAI's words for how much to think, in ours."""


class ChatBody(Shared):
    messages: list[ChatMessage]
    tools: list[ToolBody] | None = None
    tool_choice: str | ChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    function_call: str | FunctionName | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    # Of no consequence here: nothing is stored, prefixes are always kept, and there is one class of service.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    # Had no effect, and is named.
    prediction: Any = None
    verbosity: str | None = None
    # Refused.
    modalities: list[str] | None = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None

    @property
    def legacy(self) -> bool:
        """Whether calls are answered in the older form."""
        return self.functions is not None


@dataclass(frozen=True)
class Chat:
    """What a body asks for. `ignored`: fields that had no effect."""

    turns: tuple[Turn, ...]
    ignored: list[str]


def chat_of(body: ChatBody, limits: Limits, *, reasons: bool = False) -> Chat:
    """`reasons`: whether the model thinks before it answers. Raises `ApiError` and nothing else."""
    _refuse(body)
    tools, mode = _offer(body, limits)
    ignored = [] if not body.store else ["store"]
    ignored += [] if body.prediction is None else ["prediction"]
    ignored += [] if body.verbosity in (None, "medium") else ["verbosity"]
    level = _effort(body)
    if level not in (None, "none") and not reasons:
        ignored.append("reasoning_effort")
    turn = Turn(
        messages=messages_of(body.messages, limits),
        tools=tools,
        tool_mode=mode,
        parallel_calls=body.parallel_tool_calls is not False and not body.legacy,
        constraint=constraint_of(body, limits),
        sampling=sampling_of(body),
        max_tokens=_tokens(body, limits),
        stop=stops_of(body, limits),
        logprobs=_logprobs(body),
        reasoning=level if reasons else None,
        bias=bias_of(body, limits),
        priority=body.priority or 0,
    )
    turns = tuple(replace(turn, seed=seed_of(body, place)) for place in range(counted(body, limits.choices)))
    return Chat(turns, ignored)


def _refuse(body: ChatBody) -> None:
    refuse_streaming_options(body)
    refused(body.audio, "audio", "answers here are texts: leave it out")
    refused(body.moderation, "moderation", "no moderation model runs here: leave it out, and check answers yourself")
    refused(body.web_search_options, "web_search_options", "nothing is searched from here: give a tool that searches")
    if any(kind != "text" for kind in body.modalities or ()):
        refused(body.modalities, "modalities", 'answers here are texts: use ["text"]')


def _offer(body: ChatBody, limits: Limits) -> Offer:
    if body.functions is None and body.function_call is None:
        return tools_of(body.tools, body.tool_choice, limits)
    if body.tools is not None or body.tool_choice is not None:
        raise invalid(
            "functions: an older form of tools, which cannot be mixed with them: use tools alone", "functions"
        )
    return functions_of(body.functions, body.function_call, limits)


def _effort(body: ChatBody) -> str | None:
    if body.reasoning_effort is None:
        return None
    if body.reasoning_effort not in EFFORTS:
        words = f"reasoning_effort: {body.reasoning_effort[:40]!r} is not known: use {', '.join(EFFORTS)}"
        raise invalid(words, "reasoning_effort")
    return EFFORTS[body.reasoning_effort]


def _tokens(body: ChatBody, limits: Limits) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        words = f"max_tokens is {old} and max_completion_tokens is {new}: they mean the same, give one of them"
        raise invalid(words, "max_tokens")
    if old == 0:
        raise _no_tokens()
    return limited(new if new is not None else old, limits, "max_tokens" if new is None else "max_completion_tokens")


def _no_tokens() -> ApiError:
    return invalid("max_tokens: 0 leaves no room for an answer: use a whole number from 1", "max_tokens")


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: only together with logprobs: set logprobs to true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
