"""What a model says, as Anthropic's events: a message that starts, blocks that grow one after another, and how it ended.

The whole answer that a client gets without streaming is folded from the same events, so that both always say the same.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from orchard.serve.errors import ApiError
from orchard.session.turn import Call, Done, Event, Reasoning, Text, Turn, Usage

Wire = dict[str, Any]
BYTES = 4
"""The most tokens that one character of a stop string is spelled with."""


class Writer:
    """Events of a model to events of the protocol. One for an answer."""

    def __init__(self, model: str, turn: Turn, *, thoughts: bool = True) -> None:
        """`thoughts`: whether they are shown; else there is an empty block where they were."""
        self.model = model
        self.turn = turn
        self.tail: deque[int] = deque(maxlen=BYTES * max(map(len, turn.stop), default=0) + 8)
        """The last tokens of the text: those that spelled a stop string are among them."""
        self._thoughts = thoughts
        self._begin = turn.begin
        self._seen = ""  # of the beginning
        self._held = ""  # white space: text, unless a call follows
        self._open = ""  # the kind of the open block
        self._index = -1

    def start(self, input_tokens: int) -> list[Wire]:
        """`input_tokens`: as far as known; the last event has the last word."""
        message: Wire = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(input_tokens)),
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def take(self, event: Event) -> list[Wire]:
        if isinstance(event, Text):
            self.tail.extend(event.ids)
            return self._text(event.delta)
        if isinstance(event, Reasoning):
            shown = event.delta if self._thoughts else ""
            opened = self._opened({"type": "thinking", "thinking": "", "signature": ""})
            return opened + ([self._delta({"type": "thinking_delta", "thinking": shown})] if shown else [])
        if isinstance(event, Call):
            return self._call(event)
        return []

    def end(self, done: Done, stopped: str | None) -> list[Wire]:
        """`stopped`: the stop string that ended the text."""
        rest = [*self._said(self._held), *self._closed()]
        delta = {"stop_reason": self._reason(done, stopped), "stop_sequence": stopped}
        return [
            *rest,
            {"type": "message_delta", "delta": delta, "usage": usage_of(done.usage)},
            {"type": "message_stop"},
        ]

    def _reason(self, done: Done, stopped: str | None) -> str:
        if done.finish == "tool_calls":
            return "tool_use"
        if done.finish == "length":
            limit = self.turn.max_tokens
            return "max_tokens" if limit is None or done.usage.output >= limit else "model_context_window_exceeded"
        return "end_turn" if stopped is None else "stop_sequence"

    def _text(self, delta: str) -> list[Wire]:
        said = self._held + self._without_beginning(delta)
        self._held = ""
        if said and self._open != "text" and not said.strip():
            self._held = said
            return []
        return self._said(said)

    def _said(self, text: str) -> list[Wire]:
        if not text:
            return []
        return [*self._opened({"type": "text", "text": ""}), self._delta({"type": "text_delta", "text": text})]

    def _without_beginning(self, delta: str) -> str:
        """Text without what the client began it with, which clients put before the answer themselves."""
        if not self._begin:
            return delta
        self._seen += delta
        if len(self._seen) < len(self._begin) and self._begin.startswith(self._seen):
            return ""
        said, self._begin = self._seen.removeprefix(self._begin), ""
        return said

    def _call(self, call: Call) -> list[Wire]:
        self._held = ""
        name = "toolu_" + re.sub(r"^call[_-]", "", call.id)
        arguments_of(call)
        return [
            *self._closed(),
            *self._opened({"type": "tool_use", "id": name, "name": call.name, "input": {}}),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            *self._closed(),
        ]

    def _opened(self, block: Wire) -> list[Wire]:
        if self._open == block["type"]:
            return []
        closed = self._closed()
        self._open = block["type"]
        self._index += 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Wire) -> Wire:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> list[Wire]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]


def usage_of(usage: Usage) -> Wire:
    """Anthropic counts what was found in a cache beside the input, not in it."""
    return {
        "input_tokens": max(0, usage.input - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "service_tier": "standard",
    }


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments of a call, which its schema makes an object."""
    try:
        found = json.loads(call.arguments)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ApiError(
            500, "bad_tool_call", f"the model's call of {call.name} has arguments that are no object: ask again"
        )
    return found


def stop_in(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that ends a text: the first to be complete, of two that end together the longer one."""
    ends = [(start + len(stop), -len(stop), stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(ends)[2] if ends else None


def folded(events: Iterable[Wire]) -> Wire:
    """The message that the events of a stream add up to."""
    message: Wire = {}
    parts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            parts = []
        elif kind == "content_block_delta":
            parts.append(next(value for key, value in event["delta"].items() if key != "type"))
        elif kind == "content_block_stop":
            block = message["content"][-1]
            _fill(block, "".join(parts))
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def _fill(block: Wire, text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = json.loads(text)
    else:
        block[block["type"]] = text
