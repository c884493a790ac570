"""A body of `POST /v1/responses` as a turn. What needs a memory of earlier answers is refused: the server keeps none."""

from __future__ import annotations

from dataclasses import dataclass

from orchard.serve.checks import check_names, json_constraint, named_tool, sampling_of, tool_spec
from orchard.serve.errors import invalid, unsupported
from orchard.serve.openai.chat_body import EFFORTS
from orchard.serve.openai.fields import limited, refused
from orchard.serve.openai.responses_body import ResponsesBody, ResponsesToolChoice
from orchard.serve.openai.responses_input import STATELESS, messages_of
from orchard.serve.settings import Limits
from orchard.session.turn import Constraint, ToolSpec, Turn

LOGPROBS = "message.output_text.logprobs"
MODES = {"auto": "allowed", "required": "required", "none": "disallowed"}
Offer = tuple[tuple[ToolSpec, ...], str]


@dataclass(frozen=True)
class Prepared:
    """A turn; `ignored`: fields of the body that make no difference to it."""

    turn: Turn
    ignored: list[str]


def turn_of(body: ResponsesBody, limits: Limits, *, reasons: bool) -> Prepared:
    """`reasons`: whether the model can think before it answers. Raises `ApiError` and nothing else."""
    _refuse(body)
    tools, mode = tools_of(body, limits)
    level, ignored = _level(body), _ignored(body)
    if level not in (None, "none") and not reasons:
        ignored.append("reasoning.effort")
    turn = Turn(
        messages=messages_of(body, limits),
        tools=tools,
        tool_mode=mode,
        parallel_calls=body.parallel_tool_calls is not False,
        constraint=_constraint(body, limits),
        sampling=sampling_of(body.temperature, body.top_p),
        max_tokens=limited(body.max_output_tokens, limits, "max_output_tokens"),
        logprobs=_logprobs(body),
        reasoning=level if reasons else None,
        priority=body.priority or 0,
    )
    return Prepared(turn, ignored)


def _refuse(body: ResponsesBody) -> None:
    refused(body.previous_response_id, "previous_response_id", STATELESS)
    refused(body.conversation, "conversation", STATELESS)
    refused(body.prompt, "prompt", "no prompts are kept here: send instructions and input")
    if body.background:
        raise unsupported(
            "background", "answers are not kept for later: leave it out, and wait for the answer or stream it"
        )


def _ignored(body: ResponsesBody) -> list[str]:
    named = {
        "store": body.store,
        "truncation": body.truncation == "auto",
        "text.verbosity": body.text is not None and body.text.verbosity not in (None, "medium"),
        "reasoning.summary": body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary),
        "include": any(one != LOGPROBS for one in body.include or ()),
    }
    return [name for name, unheard in named.items() if unheard]


def tools_of(body: ResponsesBody, limits: Limits) -> Offer:
    """The tools that a model is shown, and whether it may, must or must not call one."""
    given = body.tools or []
    for place, tool in enumerate(given):
        if tool.type != "function":
            words = f"{tool.type[:60]!r} is not run here: give a function, and run it yourself"
            raise unsupported(f"tools.{place}.type", words)
    check_names([tool.name for tool in given], limits, "tools")
    specs = tuple(
        tool_spec(tool.name, tool.description, tool.parameters or {}, limits, f"tools.{place}.parameters")
        for place, tool in enumerate(given)
    )
    choice = body.tool_choice
    if choice is None:
        return specs, "allowed"
    return _if_any(specs, choice) if isinstance(choice, str) else _chosen(specs, choice)


def _chosen(specs: tuple[ToolSpec, ...], choice: ResponsesToolChoice) -> Offer:
    if choice.type == "function":
        return named_tool(specs, choice.name, "tool_choice.name"), "required"
    if choice.type == "allowed_tools":
        allowed = [tool for place, one in enumerate(choice.tools or ()) for tool in _named(specs, one.name, place)]
        return _if_any(tuple(allowed), choice.mode or "auto")
    raise unsupported("tool_choice.type", f"{choice.type[:60]!r} is not run here: use function or allowed_tools")


def _named(specs: tuple[ToolSpec, ...], name: str, place: int) -> tuple[ToolSpec, ...]:
    return named_tool(specs, name, f"tool_choice.tools.{place}.name")


def _if_any(specs: tuple[ToolSpec, ...], choice: str) -> Offer:
    if choice not in MODES:
        words = f"tool_choice: {choice[:40]!r} is not known: use auto, required, none, or name a function"
        raise invalid(words, "tool_choice")
    if choice == "required" and not specs:
        raise invalid("tool_choice: a call is required, and there are no tools: give tools", "tool_choice")
    return specs, MODES[choice]


def _constraint(body: ResponsesBody, limits: Limits) -> Constraint | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return json_constraint({"type": "object"}, limits, "text.format")
    if form.type != "json_schema":
        words = f"text.format.type: {form.type[:40]!r} is not known: use text, json_object or json_schema"
        raise invalid(words, "text.format.type")
    return json_constraint(form.schema_, limits, "text.format.schema")


def _logprobs(body: ResponsesBody) -> int | None:
    if body.top_logprobs is not None:
        return body.top_logprobs
    return 0 if LOGPROBS in (body.include or ()) else None


def _level(body: ResponsesBody) -> str | None:
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None:
        return None
    if effort not in EFFORTS:
        words = f"reasoning.effort: {effort[:40]!r} is not known: use {', '.join(EFFORTS)}"
        raise invalid(words, "reasoning.effort")
    return EFFORTS[effort]
