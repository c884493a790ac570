"""Chat messages: one shape inside Orchard, whatever the caller wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchard.core.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
# Newer APIs call the system role "developer"; no open model has been trained with that word, so it becomes "system".
_ALIASES = {"developer": "system"}
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


@dataclass
class Message:
    """One turn. `content` may be empty only where the assistant calls tools."""

    role: str
    content: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As chat templates expect it: absent fields are left out."""
        given = {"role": self.role, "content": self.content}
        optional = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return given | {key: value for key, value in optional.items() if value is not None}


def messages_from(obj: str | Sequence[Mapping[str, Any] | Message]) -> list[Message]:
    """A text (one user message), a list of dicts as in the OpenAI API, or a list of `Message`, checked."""
    if isinstance(obj, str):
        obj = [Message("user", obj)]
    if not isinstance(obj, Sequence) or isinstance(obj, (bytes, bytearray)):
        raise UsageError(
            f"messages must be a text or a list, not {type(obj).__name__}",
            hint='pass a string, or a list such as [{"role": "user", "content": "Hello"}]',
        )
    if not obj:
        raise UsageError("the list of messages is empty", hint="pass at least one message with some text")
    messages = [_message(index, item) for index, item in enumerate(obj)]
    if not any(message.content.strip() or message.tool_calls for message in messages):
        raise UsageError("the prompt is empty", hint="pass at least one message with some text")
    return messages


def _message(index: int, item: Any) -> Message:
    if isinstance(item, Message):
        item = item.to_dict()
    if not isinstance(item, Mapping):
        raise _wrong(index, f"must be a dict or a Message, not {type(item).__name__}")
    unknown = [key for key in item if key not in _FIELDS]
    if unknown:
        raise _wrong(index, f"has an unknown field {unknown[0]!r}; known fields: {', '.join(_FIELDS)}")
    role = item.get("role")
    role = _ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise _wrong(index, f"has the role {role!r}; roles are {', '.join(ROLES)} (developer means system)")
    for key in ("name", "tool_call_id"):
        if not isinstance(item.get(key), str | None):
            raise _wrong(index, f"has a {key!r} that is not text")
    tool_calls = _tool_calls(index, role, item.get("tool_calls"))
    content = _content(index, item.get("content"), may_be_absent=tool_calls is not None)
    return Message(role, content, item.get("name"), tool_calls, item.get("tool_call_id"))


def _content(index: int, content: Any, *, may_be_absent: bool) -> str:
    if content is None and may_be_absent:
        return ""
    if isinstance(content, list):  # the OpenAI form: a list of typed parts
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise _wrong(index, "has a content part that is not text; only text is supported here")
        content = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in content)
    if not isinstance(content, str):
        raise _wrong(index, f"has content of type {type(content).__name__}; it must be text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise _wrong(index, "holds characters that are not valid Unicode text") from None
    return content


def _tool_calls(index: int, role: str, calls: Any) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    if role != "assistant":
        raise _wrong(index, "has tool_calls, which only an assistant message may have")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise _wrong(index, "has tool_calls that are not a list of dicts")
    return [dict(call) for call in calls] or None


def _wrong(index: int, what: str) -> UsageError:
    return UsageError(
        f"message {index} {what}",
        hint='a message looks like {"role": "user", "content": "Hello"}; counting starts at 0',
    )
