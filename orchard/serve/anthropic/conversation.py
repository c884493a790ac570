"""Anthropic's messages as ours: blocks become texts, calls and results; what no model here can read is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchard.serve.anthropic.messages_body import AnthropicBlock, AnthropicMessage, Asked
from orchard.serve.errors import ApiError, invalid, unsupported
from orchard.serve.settings import Limits
from orchard.session.turn import Message

BETWEEN = "\n\n"
"""What stands between the texts of one turn: they are paragraphs of their own."""
THOUGHTS = ("thinking", "redacted_thinking")
FAILED = "Error: "


def conversation_of(asked: Asked, limits: Limits) -> tuple[tuple[Message, ...], str]:
    """The messages, and what the answer is to begin with: the text of an assistant's message that comes last."""
    if not asked.messages:
        raise invalid("messages: the list is empty: send at least one message", "messages")
    if len(asked.messages) > limits.messages:
        words = f"messages: {len(asked.messages)} messages are more than {limits.messages}: send fewer"
        raise invalid(words, "messages")
    reader = _Reader()
    if asked.system:
        reader.add("system", _texts(asked.system, "system"))
    *before, last = asked.messages
    for place, said in enumerate(before):
        reader.read(said, f"messages.{place}", last=False)
    begin = reader.read(last, f"messages.{len(before)}", last=True)
    if not any(message.role != "system" for message in reader.messages):
        raise invalid("messages: nobody has asked anything: send a message of the user", "messages")
    return tuple(reader.messages), begin


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._tools: dict[str, str] = {}
        """Names of the tools that were called, by the calls' ids."""

    def read(self, said: AnthropicMessage, place: str, *, last: bool) -> str:
        """Take a message up; answers the beginning of the answer where that is what it is."""
        blocks = _blocks(said, place)
        if said.role == "assistant":
            return self._assistant(blocks, place, last)
        if not blocks:
            raise invalid(f"{place}.content: it is empty: send some text", f"{place}.content")
        for number, block in enumerate(blocks):
            at = f"{place}.content.{number}"
            if block.type == "tool_result" and said.role == "user":
                self._result(block, at)
            else:
                self.add(said.role, _text(block, at))
        return ""

    def add(self, role: str, text: str) -> None:
        """A text; it goes on with the message before where that is of the same role."""
        if self.messages and self.messages[-1].role == role and not self.messages[-1].tool_calls:
            self.messages[-1].content += BETWEEN + text
        else:
            self.messages.append(Message(role, text))

    def _assistant(self, blocks: Sequence[AnthropicBlock], place: str, last: bool) -> str:
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            at = f"{place}.content.{number}"
            if block.type in THOUGHTS:
                continue
            if block.type == "tool_use":
                calls.append(self._call(block, at))
            else:
                texts.append(_text(block, at, may_be_empty=last))
        text = BETWEEN.join(texts)
        if calls and last:
            words = f"{place}: its calls have no results: send a user's message with a tool_result for each"
            raise invalid(words, place)
        if last:
            return text
        if calls:
            self.messages.append(Message("assistant", text, tool_calls=calls))
        elif text:
            self.add("assistant", text)
        return ""

    def _call(self, block: AnthropicBlock, at: str) -> dict[str, Any]:
        if not block.id or not block.name or block.input is None:
            raise invalid(f"{at}: a tool_use has an id, a name and an input", at)
        self._tools[block.id] = block.name
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}

    def _result(self, block: AnthropicBlock, at: str) -> None:
        if not block.tool_use_id or block.tool_use_id not in self._tools:
            known = ", ".join(list(self._tools)[-4:]) or "none"
            words = f"{at}.tool_use_id: no tool_use before it has the id {(block.tool_use_id or '')[:80]!r}: known are {known}"
            raise invalid(words, f"{at}.tool_use_id")
        text = _texts(block.content or "", f"{at}.content")
        if block.is_error and not text.lower().startswith("error"):
            text = FAILED + text
        name = self._tools[block.tool_use_id]
        self.messages.append(Message("tool", text, name=name, tool_call_id=block.tool_use_id))


def _blocks(said: AnthropicMessage, place: str) -> list[AnthropicBlock]:
    if isinstance(said.content, str):
        return [AnthropicBlock(type="text", text=said.content)] if said.content else []
    return said.content


def _texts(content: str | Sequence[AnthropicBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    return BETWEEN.join(_text(block, f"{place}.{number}") for number, block in enumerate(content))


def _text(block: AnthropicBlock, at: str, *, may_be_empty: bool = False) -> str:
    if block.type != "text":
        raise _not_text(block, at)
    if not block.text and not may_be_empty:
        raise invalid(f"{at}.text: a text block has a text", f"{at}.text")
    return block.text or ""


def _not_text(block: AnthropicBlock, at: str) -> ApiError:
    kind = block.type[:60]
    if kind in ("tool_use", "tool_result", *THOUGHTS):
        words = {"tool_use": "an assistant's message", "tool_result": "a user's message"}
        return invalid(f"{at}: {kind} belongs into {words.get(kind, 'an assistant message')}", at)
    if kind in ("image", "document"):
        return unsupported(f"{at}.type", f"models here read text only, no {kind}: send its words as a text block")
    return unsupported(f"{at}.type", f"blocks of type {kind!r} are not known here: send text, tool_use and tool_result")
