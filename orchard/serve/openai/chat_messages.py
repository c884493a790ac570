"""The messages of a chat as the client writes them, and as a model is given them."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic_core import from_json

from orchard.serve.bodies import one_of
from orchard.serve.errors import invalid, unsupported
from orchard.serve.openai.fields import Exact
from orchard.serve.settings import Limits
from orchard.session.turn import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class Part(Exact):
    type: Annotated[str, one_of("text", "refusal")]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Exact):
    name: str
    arguments: str | dict[str, Any] = "{}"
    parsed_arguments: Any = None
    """What OpenAI's package puts beside them."""


class CallBody(Exact):
    """A tool call of an earlier answer. `index`, left from a stream, means nothing here."""

    id: str | None = None
    type: Annotated[str, one_of("function")] = "function"
    function: CalledFunction | None = None
    index: Any = None


class ChatMessage(Exact):
    """`annotations` and `parsed` come back with answers that OpenAI's package wrote down; thoughts of earlier answers
    (`reasoning_content`, `reasoning`) are not shown to models again, as their makers advise."""

    role: Annotated[str, one_of(*ROLES)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None
    audio: Any = None
    annotations: Any = None
    parsed: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


def messages_of(given: list[ChatMessage], limits: Limits) -> tuple[Message, ...]:
    if not given:
        raise invalid("messages: the list is empty: give at least one message", "messages")
    if len(given) > limits.messages:
        words = f"messages: {len(given)} are more than the {limits.messages} that are allowed"
        raise invalid(words, "messages")
    names: dict[str, str] = {}
    """Tools by the ids of their calls: results carry only the id, and models are told whose result it is."""
    found = [_message(message, f"messages.{place}", names) for place, message in enumerate(given)]
    if not any(message.content.strip() or message.tool_calls for message in found):
        raise invalid("messages: there is no text in them: ask something", "messages")
    return tuple(found)


def _message(given: ChatMessage, place: str, names: dict[str, str]) -> Message:
    role = ROLES.get(given.role)
    if role is None:
        words = f"{place}.role: {given.role[:40]!r} is not known: use {', '.join(ROLES)}"
        raise invalid(words, f"{place}.role")
    if given.audio is not None:
        raise unsupported(f"{place}.audio", "spoken answers cannot be read: leave it out, and give the words")
    calls = _calls(given, place, role)
    names |= {str(call["id"]): call["function"]["name"] for call in calls}
    content = _content(given, place, role)
    if given.tool_call_id is not None and role != "tool":
        raise invalid(f"{place}.tool_call_id: only messages of the role tool have one", f"{place}.tool_call_id")
    if given.role == "tool" and given.tool_call_id is None:
        words = f"{place}.tool_call_id: missing: give the id of the call that this is the result of"
        raise invalid(words, f"{place}.tool_call_id")
    name = given.name if given.name is not None else names.get(given.tool_call_id or "")
    return Message(role, content, name, calls or None, given.tool_call_id)


def _content(given: ChatMessage, place: str, role: str) -> str:
    content = given.content
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return given.refusal or ""
        raise invalid(f"{place}.content: missing: give a text", f"{place}.content")
    return "".join(_part(part, f"{place}.content.{number}", role) for number, part in enumerate(content))


def _part(part: Part, place: str, role: str) -> str:
    if part.type == "refusal" and role == "assistant":
        return part.refusal or ""
    if part.type != "text":
        raise unsupported(place, f"parts of type {part.type[:40]!r} cannot be read: models here take text only")
    if part.text is None:
        raise invalid(f"{place}.text: missing: a part of type text has a text", f"{place}.text")
    return part.text


def _calls(given: ChatMessage, place: str, role: str) -> list[dict[str, Any]]:
    if role != "assistant" and (given.tool_calls or given.function_call is not None):
        raise invalid(f"{place}.tool_calls: only messages of the role assistant have any", f"{place}.tool_calls")
    found = []
    for number, call in enumerate(given.tool_calls or ()):
        where = f"{place}.tool_calls.{number}"
        if call.type != "function" or call.function is None:
            raise unsupported(where, f"calls of type {call.type[:40]!r} cannot be read: only functions are called here")
        found.append(_call(call.function, call.id or f"call_{number}", f"{where}.function"))
    if given.function_call is not None:
        found.append(_call(given.function_call, f"call_{given.function_call.name}", f"{place}.function_call"))
    return found


def _call(function: CalledFunction, id: str, place: str) -> dict[str, Any]:
    called = {"name": function.name, "arguments": _arguments(function.arguments, f"{place}.arguments")}
    return {"id": id, "type": "function", "function": called}


def _arguments(given: str | dict[str, Any], place: str) -> str:
    """JSON as text. What is no JSON is shown to models as it was written; what is JSON but no model can be shown (half
    characters, a thousand levels) is refused."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        from_json(text or "{}")
        return text
    except ValueError:
        pass
    try:
        json.loads(given if isinstance(given, str) else "0")
    except ValueError:
        if isinstance(given, str):
            return given
    except RecursionError:
        pass
    raise invalid(f"{place}: JSON that cannot be used: too deep, or with half characters in it", place)
