"""A body of `POST /v1/messages` as a turn: tools, how much to think, what the answer must match, how it is drawn.

What would change the answer and cannot be done is refused by name; what a model makes no difference of is named in the header
`x-orchard-ignored`.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchard.serve.anthropic.conversation import conversation_of
from orchard.serve.anthropic.messages_body import (
    AnthropicThinking,
    AnthropicToolChoice,
    Asked,
    MessagesBody,
)
from orchard.serve.checks import check_names, check_stops, json_constraint, named_tool, sampling_of, tool_spec
from orchard.serve.errors import invalid, unsupported
from orchard.serve.settings import Limits
from orchard.session.turn import Constraint, ToolSpec, Turn

EFFORTS = {"low": "light", "medium": "moderate", "high": "deep", "xhigh": "deep", "max": "deep"}
BUDGETS = ((1024, "light"), (4096, "moderate"))
"""Budgets below these numbers of tokens, and the levels they mean; larger ones mean `deep`."""


@dataclass(frozen=True)
class Prepared:
    """A turn; `ignored`: fields of the body that make no difference to it; `thoughts`: whether thoughts are shown."""

    turn: Turn
    ignored: tuple[str, ...] = ()
    thoughts: bool = True


def turn_of(body: MessagesBody, limits: Limits, *, reasons: bool) -> Prepared:
    """`reasons`: whether the model can think before it answers."""
    _refuse(body)
    messages, begin = conversation_of(body, limits)
    tools, mode = tools_of(body, limits)
    level, ignored = _level(body, reasons)
    turn = Turn(
        messages=messages,
        tools=tools,
        tool_mode=mode,
        parallel_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        constraint=_constraint(body, limits),
        begin=begin,
        sampling=sampling_of(body.temperature, body.top_p, body.top_k),
        # A bound that every request has to name is no wish for so many: more than the server gives is no mistake.
        max_tokens=min(body.max_tokens, limits.max_tokens or body.max_tokens),
        stop=check_stops(body.stop_sequences or (), limits, "stop_sequences"),
        reasoning=level,
    )
    shown = body.thinking is None or body.thinking.display != "omitted"
    return Prepared(turn, ignored, shown)


def counted(body: Asked, limits: Limits) -> Prepared:
    """What the tokens of a body are counted by."""
    _refuse(body)
    messages, begin = conversation_of(body, limits)
    tools, mode = tools_of(body, limits)
    return Prepared(Turn(messages, tools, mode, begin=begin))


def _refuse(body: Asked) -> None:
    if body.thread is not None:  # a code that Anthropic's package knows: its tool runner then goes on without
        words = "thread: this server keeps nothing of earlier answers: send the whole conversation, without thread"
        raise invalid(words, "thread", code="thread_unsupported_request")
    if body.compaction is not None:
        raise unsupported("compaction", "conversations are not summed up here: leave it out, and shorten them yourself")
    if body.container is not None:
        raise unsupported("container", "nothing is run on this server: leave it out")
    if body.mcp_servers:
        raise unsupported("mcp_servers", "this server calls no others: run the tools yourself and send their results")


def tools_of(body: Asked, limits: Limits) -> tuple[tuple[ToolSpec, ...], str]:
    """The tools, and how they may be called."""
    given = body.tools or []
    for place, tool in enumerate(given):
        if tool.type not in (None, "custom"):
            words = f"{tool.type[:60]!r} is a tool of Anthropic's servers: give a custom tool with an input_schema"
            raise unsupported(f"tools.{place}.type", words)
    check_names([tool.name for tool in given], limits, "tools")
    tools = tuple(
        tool_spec(tool.name, tool.description, tool.input_schema, limits, f"tools.{place}.input_schema")
        for place, tool in enumerate(given)
    )
    return _chosen(tools, body.tool_choice)


def _chosen(tools: tuple[ToolSpec, ...], choice: AnthropicToolChoice | None) -> tuple[tuple[ToolSpec, ...], str]:
    if choice is None or choice.type == "auto":
        return tools, "allowed"
    if choice.type == "none":
        return tools, "disallowed"
    if not tools:
        raise invalid(f"tool_choice: {choice.type!r} wants a call, and there are no tools: send tools", "tool_choice")
    if choice.type == "any":
        return tools, "required"
    return named_tool(tools, choice.name, "tool_choice.name"), "required"


def _constraint(body: MessagesBody, limits: Limits) -> Constraint | None:
    inner = body.output_config.format if body.output_config is not None else None
    if inner is not None and body.output_format is not None:
        raise invalid("output_format: it is an older name for output_config.format: send one of them", "output_format")
    form, at = (inner, "output_config.format") if inner is not None else (body.output_format, "output_format")
    if form is None:
        return None
    if form.type != "json_schema":
        raise unsupported(f"{at}.type", f"{form.type[:60]!r} is not known here: use json_schema")
    return json_constraint(form.schema_, limits, f"{at}.schema")


def _level(body: MessagesBody, reasons: bool) -> tuple[str | None, tuple[str, ...]]:
    """How much to think. Anthropic's models think where they are asked to: so do these."""
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = body.thinking
    unused = ("output_config.effort",) if effort is not None else ()
    if thinking is not None:
        _check_thinking(thinking)
    if not reasons:
        asked = thinking is not None and thinking.type != "disabled"
        return None, (("thinking",) if asked else ()) + unused
    if thinking is None or thinking.type == "disabled":
        return "none", unused
    if thinking.type == "adaptive":
        return (EFFORTS[effort] if effort is not None else None), ()
    assert thinking.budget_tokens is not None
    return next((level for below, level in BUDGETS if thinking.budget_tokens < below), "deep"), unused


def _check_thinking(thinking: AnthropicThinking) -> None:
    if thinking.type == "between_tools":
        raise unsupported("thinking.type", "between_tools is not known here: use enabled, adaptive or disabled")
    if thinking.type == "enabled" and (thinking.budget_tokens is None or thinking.budget_tokens < 1):
        words = "thinking.budget_tokens: give the number of tokens that thoughts may take, from 1"
        raise invalid(words, "thinking.budget_tokens")
