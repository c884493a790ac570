"""How a model is told of tools, and how it writes a call.

A model whose chat template takes `tools` was trained with a format of its own: the template shows the tools, and calls are
written as it shows them. Any other model gets a few lines in its system message, without examples, whose values a small model
would copy, and writes calls as JSON with spaces, as most JSON that it has read (docs/log.md has what was tried).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from orchard.core.errors import OrchardError
from orchard.session.turn import ToolSpec
from orchard.text.chat import chat_ids, conversation_pieces
from orchard.text.messages import Message
from orchard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Written:
    """What is written around the JSON of one call, and the name of the field with its arguments."""

    before: str = ""
    after: str = ""
    arguments: str = "arguments"
    marker: str = ""
    """What a model begins a call with, where it decides by itself whether to call."""


OURS = Written()
HERMES = Written("<tool_call>\n", "\n</tool_call>", marker="<tool_call>")
"""Qwen, Hermes, SmolLM3 and others."""
LLAMA = Written(arguments="parameters", marker='{"name":')
_TELL = (
    "You can call these functions:\n{tools}\n\n"
    "To call one, answer with one line of JSON. Take the arguments from the request."
)
_USE = "Use this result of {tool} to answer in one sentence:"
_LONGEST = 240
"""Characters of a description that a model is shown."""


@dataclass(frozen=True)
class ToolFormat:
    """`native`: whether the model's own template shows the tools."""

    written: Written
    native: bool

    def ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as the model reads it; `variables`: what else its template may ask for."""
        shown, told = self.for_template(messages, tools)
        return chat_ids(tokenizer, shown, tools=told, add_generation_prompt=answer, variables=variables)

    def for_template(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """What the chat template is given: messages, and tools where it takes them. Training gives it the same."""
        if self.native:
            return _with_values(messages), [_for_template(tool) for tool in tools] or None
        return (_told([self._message(message) for message in messages], tools) if tools else folded(messages)), None

    def call_text(self, name: str, arguments: Any) -> str:
        """One call as this format writes it."""
        return self.written.before + _line({"name": name, self.written.arguments: arguments}) + self.written.after

    def read(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments (as JSON) of the whole calls in a text that is nothing but calls."""
        reader, calls, at = json.JSONDecoder(), [], text.find("{")
        while at >= 0:
            try:
                call, end = reader.raw_decode(text, at)
            except ValueError:  # cut off: no whole call any more
                break
            calls.append((call["name"], json.dumps(call[self.written.arguments], ensure_ascii=False)))
            at = text.find("{", end)
        return calls

    def _message(self, message: Message) -> Message:
        """A message in words that any template can write: no roles or fields for tools."""
        if message.role == "tool":
            about = f"Result of {message.name}" if message.name else "Result"
            return Message("user", f"{about}: {message.content}")
        if message.tool_calls:
            lines = [self.call_text(*called(call)) for call in message.tool_calls]
            return Message(message.role, "\n".join([message.content, *lines] if message.content else lines))
        return message


@lru_cache(maxsize=16)
def _known(template: str | None, takes_tools: bool) -> ToolFormat:
    if takes_tools and "<tool_call>" in (template or ""):
        return ToolFormat(HERMES, native=True)
    if takes_tools and '"parameters"' in (template or "") and "[TOOL_CALLS]" not in (template or ""):
        return ToolFormat(LLAMA, native=True)
    return ToolFormat(OURS, native=False)


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """The format of a model: its template is rendered with a tool and without, and takes tools if that makes a difference."""
    asked = [Message("user", "Hello")]
    example = {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}
    try:
        told = tokenizer.chat_template is not None and conversation_pieces(
            tokenizer, asked, tools=[{"type": "function", "function": example}]
        ) != conversation_pieces(tokenizer, asked)
    except OrchardError:  # a template that cannot be rendered so takes no tools
        told = False
    return _known(tokenizer.chat_template, told)


def called(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and arguments of a call in a message: OpenAI's form, or the function alone; arguments as values or as JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # what is no JSON is shown as it was written
            arguments = json.loads(arguments or "{}")
    return str(function.get("name", "")), arguments


def folded(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as facts beside the question: a small model that sees a call in its own words writes the next one."""
    made: list[Message] = []
    for message in messages:
        if message.role == "tool" and made and made[-1].role == "user":
            fact = f"{_USE.format(tool=message.name or 'a tool')} {message.content}"
            made[-1] = replace(made[-1], content=f"{made[-1].content}\n\n{fact}")
        elif message.role == "tool":
            made.append(Message("user", f"{_USE.format(tool=message.name or 'a tool')} {message.content}"))
        elif not message.tool_calls:
            made.append(message)
        elif message.content:
            made.append(Message(message.role, message.content))
    return made


def shown(tools: Sequence[ToolSpec]) -> str:
    """Tools in few words: a line for each, and a line for each of its parameters."""
    lines: list[str] = []
    for tool in tools:
        lines.append(f"{tool.name}: {short(tool.description)}" if tool.description else tool.name)
        required = tool.parameters.get("required", ())
        for name, part in tool.parameters.get("properties", {}).items() if tool.in_prompt else ():
            kind = _kind(part) + ("" if name in required else ", optional")
            words = short(part.get("description", "")) if isinstance(part, Mapping) else ""
            lines.append(f"  {name} ({kind}): {words}" if words else f"  {name} ({kind})")
    return "\n".join(lines)


def _told(messages: list[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    system = messages[0].content if messages and messages[0].role == "system" else ""
    rest = messages[1:] if system else messages
    words = _TELL.format(tools=shown(tools))
    return [Message("system", f"{system}\n\n{words}" if system else words), *rest]


def _with_values(messages: Sequence[Message]) -> list[Message]:
    """Templates write arguments as JSON themselves, so they are given values."""
    made = []
    for message in messages:
        if message.tool_calls:
            named = [(call, *called(call)) for call in message.tool_calls]
            calls = [
                {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": values}}
                for call, name, values in named
            ]
            message = replace(message, tool_calls=calls)
        made.append(message)
    return made


def _for_template(tool: ToolSpec) -> dict[str, Any]:
    parameters = tool.parameters if tool.in_prompt else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _kind(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "any"
    if "enum" in part:
        return " or ".join(_line(choice) for choice in part["enum"][:12])
    kind = part.get("type", "object" if "$ref" in part else "any")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    return f"list of {_kind(part['items'])}" if kind == "array" and "items" in part else str(kind)


def short(words: str) -> str:
    """One line of at most so many characters as a model is shown."""
    line = " ".join(words.split())
    return line if len(line) <= _LONGEST else line[: line.rfind(" ", 0, _LONGEST)] + " …"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
