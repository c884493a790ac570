"""A chat's answer as it is written: chunks of `chat.completion.chunk`.

A stream is mostly small texts, many a second for every client. All of a chunk but the text itself is written once for the whole
stream; what is left for a token is to quote it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from orchard.serve.errors import openai_body
from orchard.serve.openai.answers import head, usage_of
from orchard.serve.openai.logprobs import ChatLogprobs, Spell
from orchard.serve.sse import sse, together
from orchard.session.turn import Call, Done, Event, Reasoning, Text, Usage

if TYPE_CHECKING:
    from orchard.serve.openai.chat_body import ChatBody
    from orchard.serve.service import Ask, Service

END = sse("[DONE]")


class ChatChunks:
    """Writes the events of one request. `spell`: what tells the bytes of tokens, for log-probabilities."""

    def __init__(self, body: ChatBody, ask: Ask, spell: Spell | None) -> None:
        jobs = ask.jobs
        start = json.dumps(head("chatcmpl", "chat.completion.chunk", ask.model), separators=(",", ":"))[:-1]
        self._before = [f'data: {start},"choices":[{{"index":{index},"delta":' for index in range(len(jobs))]
        self._texts = [f'{before}{{"content":' for before in self._before]
        self._thoughts = [f'{before}{{"reasoning_content":' for before in self._before]
        self._close = ',"usage":null}\n\n' if body.wants_usage else "}\n\n"
        self._after_text = '},"logprobs":null,"finish_reason":null}]' + self._close
        self._for_usage = f'data: {start},"choices":[],"usage":'
        self._wants_usage = body.wants_usage
        self._legacy = body.legacy
        self._offers_tools = bool(getattr(jobs[0], "tools", ()))
        self._logprobs = [ChatLogprobs(spell, stops=bool(job.stop)) for job in jobs]
        self._calls = [0] * len(jobs)
        self._used = [Usage()] * len(jobs)

    def begin(self) -> bytes:
        """Who speaks. An answer that may be nothing but a call has no content yet."""
        role = {"role": "assistant", "content": None if self._offers_tools else "", "refusal": None}
        return "".join(self._chunk(index, role) for index in range(len(self._before))).encode()

    def of(self, events: list[tuple[int, Event]]) -> bytes:
        """What is sent of some events: all in one piece."""
        found: list[str] = []
        for index, event in events:
            kind = type(event)
            if kind is Text and not event.logprobs:  # type: ignore[union-attr]
                if event.delta:  # type: ignore[union-attr]
                    found += (self._texts[index], quoted(event.delta), self._after_text)  # type: ignore[union-attr]
            elif kind is Reasoning:
                found += (self._thoughts[index], quoted(event.delta), self._after_text)  # type: ignore[union-attr]
            else:
                found.append(self._rare(index, event))
        return "".join(found).encode()

    def end(self) -> bytes:
        if not self._wants_usage:
            return END
        used = usage_of(self._used[:1], self._used)
        return f"{self._for_usage}{json.dumps(used, separators=(',', ':'))}}}\n\n".encode() + END

    def _rare(self, index: int, event: Event) -> str:
        if isinstance(event, Text):
            entries = self._logprobs[index].entries(event)
            return self._chunk(index, {"content": event.delta}, {"content": entries, "refusal": None})
        if isinstance(event, Call):
            return self._chunk(index, self._call(index, event))
        assert isinstance(event, Done)
        self._used[index] = event.usage
        return self._chunk(index, {}, None, finish_of(event, legacy=self._legacy))

    def _call(self, index: int, event: Call) -> dict[str, Any]:
        function = {"name": event.name, "arguments": event.arguments}
        if self._legacy:
            return {"function_call": function}
        number = self._calls[index]
        self._calls[index] += 1
        return {"tool_calls": [{"index": number, "id": event.id, "type": "function", "function": function}]}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> str:
        rest = json.dumps({"logprobs": logprobs, "finish_reason": finish}, separators=(",", ":"))
        return f"{self._before[index]}{json.dumps(delta, separators=(',', ':'))},{rest[1:]}]{self._close}"


async def chat_events(service: Service, ask: Ask, chunks: ChatChunks) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream. What cannot be answered raises before the first of them; what goes wrong later is told in the
    stream, as its last event."""
    async with service.run(ask) as run:
        yield chunks.begin()
        try:
            async for events in together(run):
                data = chunks.of(events)
                if data:
                    yield data
            yield chunks.end()
        except Exception as error:
            yield sse(openai_body(service.told(error)))


def finish_of(event: Done, *, legacy: bool) -> str:
    return "function_call" if legacy and event.finish == "tool_calls" else event.finish
