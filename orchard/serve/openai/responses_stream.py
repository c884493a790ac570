"""What a model says, as the events of OpenAI's responses: items that are added, parts that grow, and the response as it stands.

The whole response that a client gets without streaming is put together by the same writer, so that both always say the same.
"""

from __future__ import annotations

import time
from typing import Any

from orchard.serve.errors import ApiError
from orchard.serve.openai.answers import new_id
from orchard.serve.openai.logprobs import ChatLogprobs
from orchard.serve.openai.responses_body import ResponsesBody
from orchard.session.turn import Call, Done, Event, Reasoning, Text, Usage

Wire = dict[str, Any]


class Writer:
    """Events of a model to events of the protocol. One for a response; `response` is the response so far."""

    def __init__(self, body: ResponsesBody, model: str, logprobs: ChatLogprobs | None = None) -> None:
        self.response = response_of(body, model)
        self._logprobs = logprobs
        self._sequence = -1
        self._held = ""  # white space: text, unless a call follows
        self._item: Wire | None = None
        """The item that is growing, which is the last of the output."""
        self._said: list[str] = []
        self._entries: list[Wire] = []

    def start(self) -> list[Wire]:
        return [self._state("created"), self._state("in_progress")]

    def take(self, event: Event) -> list[Wire]:
        if isinstance(event, Text):
            entries = self._logprobs.entries(event) if self._logprobs is not None else []
            said, self._held = self._held + event.delta, ""
            if not entries and not said.strip() and not self._is_open("message"):
                self._held = said
                return []
            return self._text(said, entries) if said or entries else []
        if isinstance(event, Reasoning):
            return self._thought(event.delta)
        return self._call(event) if isinstance(event, Call) else []

    def end(self, done: Done) -> list[Wire]:
        cut = done.finish == "length"
        last = [
            *(self._text(self._held, []) if self._held else ()),
            *self._closed("incomplete" if cut else "completed"),
        ]
        self.response["usage"] = usage_of(done.usage)
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*last, self._state(self.response["status"])]

    def fail(self, error: ApiError) -> list[Wire]:
        """Something went wrong after the first event was sent."""
        last = self._closed("incomplete")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*last, self._state("failed")]

    # Items ------------------------------------------------------------------------------------------------------------

    def _text(self, said: str, entries: list[Wire]) -> list[Wire]:
        opened: list[Wire] = []
        if not self._is_open("message"):
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
            opened = [*self._closed(), *self._added(item), self._part("added", _output_text("", []))]
        self._said.append(said)
        self._entries += entries
        short = [{"token": one["token"], "logprob": one["logprob"], "top_logprobs": _tops(one)} for one in entries]
        return [*opened, self._event("output_text.delta", content_index=0, delta=said, logprobs=short)]

    def _thought(self, said: str) -> list[Wire]:
        opened: list[Wire] = []
        if not self._is_open("reasoning"):
            item: Wire = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}
            opened = [*self._closed(), *self._added(item), self._part("added", {"type": "reasoning_text", "text": ""})]
        self._said.append(said)
        return [*opened, self._event("reasoning_text.delta", content_index=0, delta=said)]

    def _call(self, call: Call) -> list[Wire]:
        self._held = ""
        item = {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        opened = [*self._closed(), *self._added(item)]
        self._said.append(call.arguments)
        return [*opened, self._event("function_call_arguments.delta", delta=call.arguments), *self._closed()]

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _added(self, item: Wire) -> list[Wire]:
        self._item = item | {"status": "in_progress"}
        self._said, self._entries = [], []
        self.response["output"].append(self._item)
        return [self._numbered("output_item.added", output_index=self._index, item=_copy(self._item))]

    def _closed(self, status: str = "completed") -> list[Wire]:
        """The end of the item that is growing: what it says as a whole."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._said)
        if item["type"] == "function_call":
            item["arguments"] = text
            ends = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            is_text = item["type"] == "message"
            part = _output_text(text, self._entries) if is_text else {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            more = {"logprobs": self._entries} if is_text else {}
            said = self._event(f"{part['type']}.done", content_index=0, text=text, **more)
            ends = [said, self._part("done", part)]
        item["status"] = status
        ends.append(self._numbered("output_item.done", output_index=self._index, item=_copy(item)))
        self._item = None
        return ends

    # Events -----------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _state(self, state: str) -> Wire:
        return self._numbered(
            state, response=self.response | {"output": [_copy(one) for one in self.response["output"]]}
        )

    def _part(self, what: str, part: Wire) -> Wire:
        return self._event(f"content_part.{what}", content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> Wire:
        """An event of the item that is growing."""
        assert self._item is not None
        return self._numbered(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _numbered(self, kind: str, **fields: Any) -> Wire:
        self._sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self._sequence, **fields}


def response_of(body: ResponsesBody, model: str) -> Wire:
    """A response before the first word, with what was asked for."""
    form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else None
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": _choice(body),
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def usage_of(usage: Usage) -> Wire:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _tool(tool: Wire) -> Wire:
    known = ("type", "name", "description", "parameters")
    return {name: tool[name] for name in known} | {"strict": True}


def _output_text(text: str, logprobs: list[Wire]) -> Wire:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _tops(entry: Wire) -> list[Wire]:
    return [{"token": one["token"], "logprob": one["logprob"]} for one in entry["top_logprobs"]]


def _copy(item: Wire) -> Wire:
    """As it is now: it goes on growing."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _id(kind: str) -> str:
    return new_id(kind).replace("-", "_")
