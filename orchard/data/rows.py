"""The forms a row may have, and what is wrong with one that has none of them. Further fields are left alone.

{"messages": [...], "tools": [...]}                      a conversation
{"prompt": ..., "completion": ...}                       a question and its answer: texts, or lists of messages
{"prompt": ..., "chosen": ..., "rejected": ...}          a preference: texts, or lists of messages
{"chosen": [...], "rejected": [...]}                     two conversations that differ in their last answer
{"text": "..."}                                          plain text

A row that is to be answered and not learnt from (`asked`) needs no answer, and keeps its further fields for whoever judges
what was answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchard.core.errors import UsageError
from orchard.data.errors import BadSample
from orchard.text.messages import messages_from

FIELDS = ("messages", "prompt", "completion", "chosen", "rejected", "text", "tools")
_WHO_FOLLOWS = {"system": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}


def checked(data: Any, place: str) -> dict[str, Any]:
    """The row with the fields of its form only, or `BadSample`. Conversations are lists of dicts from here on."""
    if not isinstance(data, Mapping):
        raise _bad(place, "wrong-type", f"a row must be an object, not {_kind(data)}")
    data = {name: data[name] for name in FIELDS if data.get(name) is not None}
    tools = _tools(data.get("tools"), place)
    if "messages" in data:
        return {"messages": conversation(data["messages"], place), **tools}
    if "chosen" in data or "rejected" in data:
        return {**_preference(data, place), **tools}
    if "completion" in data:
        return {**_question(data, "completion", place), **tools}
    if "text" in data:
        return {"text": text(data["text"], "text", place)}
    raise _bad(place, "no-form", "has none of: messages; prompt and completion; chosen and rejected; text")


def asked(data: Any, place: str) -> dict[str, Any]:
    """A row with a question: `prompt` (a text) or `messages` that end with something to answer, and every other field as it is.
    An answer at the end of a conversation is taken off and becomes the `completion`, if there is no other."""
    if not isinstance(data, Mapping):
        raise _bad(place, "wrong-type", f"a row must be an object, not {_kind(data)}")
    others = {str(name): value for name, value in data.items() if name not in ("messages", "prompt", "tools")}
    others |= _tools(data.get("tools"), place)
    name = "messages" if data.get("messages") is not None else "prompt"
    if data.get(name) is None:
        raise _bad(place, "no-form", "has none of: messages; prompt")
    if isinstance(data[name], str):
        return {**others, "prompt": text(data[name], name, place)}
    messages = _messages(data[name], place, name)
    _check_order(messages, place, name)
    if messages[-1]["role"] == "assistant":
        others.setdefault("completion", messages.pop()["content"])
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise _bad(place, "roles", f"{name!r} does not end with something to answer")
    return {**others, "messages": messages}


def text(value: Any, name: str, place: str, what: str = "empty") -> str:
    if not isinstance(value, str):
        raise _bad(place, "wrong-type", f"{name!r} must be text, not {_kind(value)}")
    if not value.strip():
        raise _bad(place, what, f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _bad(place, "not-unicode", f"{name!r} holds characters that are not valid Unicode") from None
    return value


def conversation(value: Any, place: str, name: str = "messages") -> list[dict[str, Any]]:
    """Messages in order, ending with an answer."""
    messages = _messages(value, place, name)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise _bad(place, "no-answer", f"{name!r} has no message of the assistant")
    _check_order(messages, place, name)
    if roles[-1] != "assistant":
        raise _bad(place, "roles", f"{name!r} ends with a message of the {roles[-1]}, which nothing answers")
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise _bad(place, "empty-answer", f"{name!r}: message {index} is an empty answer")
    return messages


def _messages(value: Any, place: str, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _bad(place, "wrong-type", f"{name!r} must be a list of messages, not {_kind(value)}")
    try:
        return [message.to_dict() for message in messages_from(value)]
    except UsageError as error:
        raise _bad(place, "wrong-type" if value else "empty", f"{name!r}: {error.message}") from error


def _check_order(messages: list[dict[str, Any]], place: str, name: str) -> None:
    """System first or not at all; then user and assistant in turn; tools answer calls."""
    before = "system"
    for index, message in enumerate(messages):
        role = message["role"]
        allowed = _WHO_FOLLOWS[before] if index else ("system", "user")
        if before == "assistant" and index and messages[index - 1].get("tool_calls"):
            allowed = ("tool", "user")
        if role not in allowed:
            after = f"after the {before}" if index else "at the beginning"
            raise _bad(
                place, "roles", f"{name!r}: message {index} is the {role}'s, {after} comes {' or '.join(allowed)}"
            )
        before = role


def _question(data: dict[str, Any], answer: str, place: str) -> dict[str, Any]:
    prompt, value = data.get("prompt"), data[answer]
    if prompt is None:
        raise _bad(place, "no-form", f"{answer!r} without 'prompt'")
    if isinstance(value, str) and isinstance(prompt, str):
        return {
            "prompt": text(prompt, "prompt", place),
            "completion": text(value, answer, place, what="empty-answer"),
        }
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answered = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    if not isinstance(asked, list) or not isinstance(answered, list):
        wrong, name = (asked, "prompt") if not isinstance(asked, list) else (answered, answer)
        raise _bad(place, "wrong-type", f"{name!r} must be text or a list of messages, not {_kind(wrong)}")
    return {"messages": conversation([*asked, *answered], place, f"prompt + {answer}")}


def _preference(data: dict[str, Any], place: str) -> dict[str, Any]:
    for name in ("chosen", "rejected"):
        if name not in data:
            raise _bad(place, "no-form", f"a preference without {name!r}")
    if "prompt" in data:
        sides = {name: _question(data, name, place) for name in ("chosen", "rejected")}
    else:
        sides = {name: {"messages": conversation(data[name], place, name)} for name in ("chosen", "rejected")}
    chosen, rejected = sides["chosen"], sides["rejected"]
    if chosen == rejected:
        raise _bad(place, "same-answers", "'chosen' and 'rejected' are the same")
    if chosen.keys() != rejected.keys():
        raise _bad(place, "wrong-type", "'chosen' and 'rejected' must both be texts or both be lists of messages")
    if "messages" in chosen and chosen["messages"][:-1] != rejected["messages"][:-1]:
        raise _bad(place, "other-prompts", "'chosen' and 'rejected' differ before their last message")
    return sides


def _tools(value: Any, place: str) -> dict[str, Any]:
    if value is None or value == []:
        return {}
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _bad(place, "wrong-type", "'tools' must be a list of objects")
    return {"tools": value}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _bad(place: str, reason: str, message: str) -> BadSample:
    return BadSample(message, reason=reason, place=place)
