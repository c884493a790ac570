"""A turn as the body of `POST /chat/completions`.

Fields are OpenAI's where OpenAI has them. What only other servers know (`top_k`, `min_p`, `repetition_penalty`, which vLLM,
llama.cpp and others read) is sent only where the caller asked for it. Nothing that was asked for is left out in silence: what
the protocol cannot carry is refused by name before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.session.errors import UnsupportedCapabilityError
from orchard.session.turn import Capability, ToolSpec, Turn
from orchard.text.messages import Message

EFFORTS = {"light": "low", "moderate": "medium", "deep": "high"}
_KIND_HINT = "give a JSON Schema instead, or use a model on this machine"


def body_of(turn: Turn, model: str, extra: Mapping[str, Any], capabilities: frozenset[Capability]) -> dict[str, Any]:
    """The JSON of a request. `extra` has the last word; None in it takes a field out."""
    _refuse(turn, capabilities)
    body: dict[str, Any] = {
        "model": model,
        "messages": [message_of(message) for message in turn.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "top_k": turn.sampling.top_k,
        "min_p": turn.sampling.min_p,
        "repetition_penalty": turn.sampling.repetition_penalty,
        "presence_penalty": turn.sampling.presence_penalty,
        "frequency_penalty": turn.sampling.frequency_penalty,
        "logit_bias": {str(token): value for token, value in turn.bias.items()} or None,
        "priority": turn.priority or None,
        "max_tokens": turn.max_tokens,
        "seed": turn.seed if "seed" in capabilities else None,  # a session draws one for every turn: no wish to refuse
        "stop": list(turn.stop) or None,
        "logprobs": True if turn.logprobs is not None else None,
        "top_logprobs": turn.logprobs or None,
        "reasoning_effort": EFFORTS.get(turn.reasoning, turn.reasoning) if turn.reasoning else None,
        **_tools(turn),
        **({"response_format": response_format(turn.constraint)} if turn.constraint is not None else {}),
        **extra,
    }
    return {key: value for key, value in body.items() if value is not None}


def message_of(message: Message) -> dict[str, Any]:
    """A message as the endpoint takes it: arguments of calls are JSON texts, and a call without words has no content."""
    wire = message.to_dict()
    if message.role == "tool":
        wire.pop("name", None)
    if message.tool_calls:
        wire["tool_calls"] = [_call(number, call) for number, call in enumerate(message.tool_calls)]
        wire["content"] = message.content or None
    return wire


def _call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    known = call.get("function")
    function: Mapping[str, Any] = known if isinstance(known, Mapping) else call
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = str(function.get("name", ""))
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def tool_of(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": plain(spec.parameters)}
    return {"type": "function", "function": function}


def _tools(turn: Turn) -> dict[str, Any]:
    names = [spec.name for spec in turn.tools]
    if turn.tool_mode not in ("allowed", "disallowed") and (
        turn.tool_mode not in names and turn.tool_mode != "required"
    ):
        hint = f"the tools are {', '.join(names)}" if names else "this turn has no tools"
        raise UsageError(f"the tool {turn.tool_mode!r} must be called but is not there", hint=hint)
    if not names:
        if turn.tool_mode == "required":
            raise UsageError("a tool must be called but there is none", hint="give the session tools, or allow text")
        return {}
    choices = {"allowed": "auto", "required": "required", "disallowed": "none"}
    choice: Any = choices.get(turn.tool_mode)
    # A tool may be called "allowed": a name that is a tool's wins only where it is no mode.
    if choice is None:
        choice = {"type": "function", "function": {"name": turn.tool_mode}}
    chosen: dict[str, Any] = {"tools": [tool_of(spec) for spec in turn.tools], "tool_choice": choice}
    if not turn.parallel_calls and choice != "none":
        chosen["parallel_tool_calls"] = False
    return chosen


def response_format(constraint: Constraint) -> dict[str, Any]:
    """What holds an answer to a JSON Schema; other constraints are not part of the protocol."""
    if constraint.kind != "json_schema":
        what = {"regex": "a regular expression", "choices": "choices", "lark": "a grammar"}[constraint.kind]
        raise UnsupportedCapabilityError(f"an endpoint cannot hold an answer to {what}", hint=_KIND_HINT)
    schema = plain(json.loads(constraint.source))
    schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    name = schema.get("title") if isinstance(schema.get("title"), str) else ""
    safe = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "_" for letter in name or ""
    )
    # `strict` is a promise to fit OpenAI's subset; servers with grammars of their own hold the answer to it either way.
    described = {"name": safe[:64] or "answer", "schema": schema, "strict": is_strict(schema)}
    return {"type": "json_schema", "json_schema": described}


def plain(schema: Any) -> Any:
    """A schema without our own words (`x-order`), which strict servers refuse; properties keep their order."""
    if isinstance(schema, Mapping):
        return {key: _below(key, value) for key, value in schema.items() if not str(key).startswith("x-")}
    return schema


def _below(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):  # names, not keywords
        return {name: plain(part) for name, part in value.items()} if isinstance(value, Mapping) else value
    if key in ("enum", "const", "default", "examples"):  # values, not schemas
        return value
    if isinstance(value, list):
        return [plain(part) for part in value]
    return plain(value)


def is_strict(schema: Any) -> bool:
    """Whether every object is closed and has all its properties required, as OpenAI's strict mode wants."""
    if isinstance(schema, list):
        return all(is_strict(part) for part in schema)
    if not isinstance(schema, Mapping):
        return True
    if "properties" in schema or schema.get("type") == "object":
        names = schema.get("properties", {})
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(names):
            return False
    return all(is_strict(value) for key, value in schema.items() if key not in ("enum", "const", "default", "examples"))


def _refuse(turn: Turn, capabilities: frozenset[Capability]) -> None:
    """What this endpoint, or the protocol, cannot do; by name, before anything is sent."""
    needs: list[tuple[bool, Capability | None, str]] = [
        (bool(turn.adapters), None, "adapters"),
        (bool(turn.begin), None, "an answer with a given beginning"),
        (turn.constraint is not None, "guided", "answers held to a schema"),
        (bool(turn.tools) and turn.tool_mode != "disallowed", "tools", "tools"),
        (turn.logprobs is not None, "logprobs", "log-probabilities"),
        (turn.reasoning is not None, "reasoning", "levels of reasoning"),
    ]
    for asked, capability, what in needs:
        if asked and (capability is None or capability not in capabilities):
            hint = "leave it out, or use a model on this machine"
            raise UnsupportedCapabilityError(f"this endpoint does not do {what}", hint=hint)
