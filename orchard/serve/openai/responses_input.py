"""The items of `POST /v1/responses` as messages: texts, calls and results; thoughts that come back are left out."""

from __future__ import annotations

from typing import Any

from orchard.serve.errors import invalid, unsupported
from orchard.serve.openai.responses_body import ResponsesBody, ResponsesItem, ResponsesPart
from orchard.serve.settings import Limits
from orchard.session.turn import Message

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
STATELESS = "this server keeps nothing of earlier answers: send the whole conversation as input"


def messages_of(body: ResponsesBody, limits: Limits) -> tuple[Message, ...]:
    reader = _Reader()
    if body.instructions:
        reader.add("system", body.instructions)
    if isinstance(body.input, str):
        reader.add("user", body.input)
    else:
        if len(body.input) > limits.messages:
            words = f"input: {len(body.input)} items are more than {limits.messages}: send fewer"
            raise invalid(words, "input")
        for place, item in enumerate(body.input):
            reader.read(item, f"input.{place}")
    told = [message for message in reader.messages if message.role != "system"]
    if not any(message.content.strip() or message.tool_calls for message in told):
        raise invalid("input: there is no text in it: ask something", "input")
    return tuple(reader.messages)


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._tools: dict[str, str] = {}
        """Names of the tools that were called, by the calls' ids."""

    def read(self, item: ResponsesItem, at: str) -> None:
        kind = item.type or ("message" if item.role is not None else "item_reference")
        if kind == "message":
            self._message(item, at)
        elif kind == "function_call":
            self._call(item, at)
        elif kind == "function_call_output":
            self._result(item, at)
        elif kind == "item_reference":
            raise unsupported(f"{at}.id", STATELESS)
        elif kind != "reasoning":
            words = (
                f"items of type {kind[:60]!r} are not known here: send messages, function_call and function_call_output"
            )
            raise unsupported(f"{at}.type", words)

    def add(self, role: str, text: str) -> None:
        """What systems and developers say one after another is one message: templates know of no second."""
        if role == "system" and self.messages and self.messages[-1].role == "system":
            self.messages[-1].content += "\n\n" + text
        else:
            self.messages.append(Message(role, text))

    def _message(self, item: ResponsesItem, at: str) -> None:
        role = ROLES.get(item.role or "")
        if role is None:
            words = f"{at}.role: {(item.role or '')[:40]!r} is not known: use {', '.join(ROLES)}"
            raise invalid(words, f"{at}.role")
        if item.content is None:
            raise invalid(f"{at}.content: missing: give a text", f"{at}.content")
        self.add(role, text_of(item.content, f"{at}.content"))

    def _call(self, item: ResponsesItem, at: str) -> None:
        if not item.call_id or not item.name:
            raise invalid(f"{at}: a function_call has a call_id, a name and arguments", at)
        self._tools[item.call_id] = item.name
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call: dict[str, Any] = {"id": item.call_id, "type": "function", "function": function}
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant":  # calls of one answer, and what it said before them
            last.tool_calls = [*(last.tool_calls or ()), call]
        else:
            self.messages.append(Message("assistant", "", tool_calls=[call]))

    def _result(self, item: ResponsesItem, at: str) -> None:
        if not item.call_id or item.call_id not in self._tools:
            words = f"{at}.call_id: no function_call before it has the id {(item.call_id or '')[:80]!r}: {STATELESS}"
            raise invalid(words, f"{at}.call_id")
        if item.output is None:
            raise invalid(f"{at}.output: missing: give what the tool answered", f"{at}.output")
        text = text_of(item.output, f"{at}.output")
        self.messages.append(Message("tool", text, name=self._tools[item.call_id], tool_call_id=item.call_id))


def text_of(content: str | list[ResponsesPart], at: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{at}.{number}") for number, part in enumerate(content))


def _part(part: ResponsesPart, at: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in TEXTS:
        raise unsupported(
            f"{at}.type", f"models here read text only, no {part.type[:60]}: send its words as input_text"
        )
    if part.text is None:
        raise invalid(f"{at}.text: missing: a part of type {part.type} has a text", f"{at}.text")
    return part.text
