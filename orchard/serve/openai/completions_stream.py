"""Texts as they are gone on with: chunks of `text_completion`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from orchard.serve.errors import openai_body
from orchard.serve.openai.answers import head, usage_of
from orchard.serve.openai.logprobs import Spell, TextLogprobs
from orchard.serve.sse import sse, together
from orchard.session.turn import Done, Event, Text, Usage

if TYPE_CHECKING:
    from orchard.serve.openai.completions_body import CompletionBody
    from orchard.serve.service import Ask, Service

END = sse("[DONE]")
Pairs = list[tuple[int, Event]]


def groups(ask: Ask, service: Service) -> list[Ask]:
    """A request for many texts, in parts that the server runs at once."""
    limits = service.settings.limits
    size = max(1, min(limits.running, limits.per_client))
    return [replace(ask, jobs=ask.jobs[place : place + size]) for place in range(0, len(ask.jobs), size)]


async def all_events(service: Service, asks: Sequence[Ask]) -> AsyncIterator[Pairs]:
    """The events of all parts, one part after the other; the first time there are none: the first part has begun."""
    before = 0
    for ask in asks:
        async with service.run(ask) as run:
            if not before:
                yield []
            async for events in together(run):
                yield [(before + index, event) for index, event in events] if before else events
        before += len(ask.jobs)


class Marks:
    """Log-probabilities of all texts of a request. The first text of an answer with `echo` is the prompt."""

    def __init__(self, body: CompletionBody, ask: Ask, spell: Spell | None) -> None:
        wanted = body.logprobs is not None
        self._of = [TextLogprobs(spell, stops=bool(job.stop)) for job in ask.jobs] if wanted else None
        self._echoed = [not body.echo] * len(ask.jobs)

    def shape(self, index: int, event: Event) -> dict[str, list[Any]] | None:
        """None: nothing is to be told."""
        if self._of is None:
            return None
        if isinstance(event, Done):
            return self._of[index].last(event)
        if not isinstance(event, Text):
            return None
        prompt = not self._echoed[index] and len(event.ids) == len(event.logprobs) + 1
        self._echoed[index] = True
        return self._of[index].shape(event, first_unknown=prompt)


class TextChunks:
    """Writes the events of one request. `choices`: answers to each prompt."""

    def __init__(self, body: CompletionBody, ask: Ask, spell: Spell | None, choices: int) -> None:
        start = json.dumps(head("cmpl", "text_completion", ask.model), separators=(",", ":"))[:-1]
        self._before = [f'data: {start},"choices":[{{"index":{index},"text":' for index in range(len(ask.jobs))]
        self._close = ',"usage":null}\n\n' if body.wants_usage else "}\n\n"
        self._after = ',"logprobs":null,"finish_reason":null}]' + self._close
        self._for_usage = f'data: {start},"choices":[],"usage":'
        self._wants_usage = body.wants_usage
        self._marks = Marks(body, ask, spell)
        self._used = [Usage()] * len(ask.jobs)
        self._choices = choices

    def of(self, events: Pairs) -> bytes:
        found: list[str] = []
        for index, event in events:
            shape = self._marks.shape(index, event)
            if isinstance(event, Done):
                self._used[index] = event.usage
                found += self._chunk(index, "", shape, event.finish)
            elif isinstance(event, Text) and shape is not None:
                if event.delta or shape["tokens"]:
                    found += self._chunk(index, event.delta, shape, None)
            elif isinstance(event, Text) and event.delta:
                found += (self._before[index], quoted(event.delta), self._after)
        return "".join(found).encode()

    def _chunk(self, index: int, text: str, shape: Any, finish: str | None) -> tuple[str, ...]:
        rest = json.dumps({"logprobs": shape, "finish_reason": finish}, separators=(",", ":"))
        return self._before[index], quoted(text), ",", rest[1:], "]", self._close

    def end(self) -> bytes:
        if not self._wants_usage:
            return END
        used = usage_of(self._used[:: self._choices], self._used)
        return f"{self._for_usage}{json.dumps(used, separators=(',', ':'))}}}\n\n".encode() + END


async def text_events(service: Service, asks: Sequence[Ask], chunks: TextChunks) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream. What the first part cannot be answered for raises before the first of them."""
    begun = False
    try:
        async for events in all_events(service, asks):
            data = chunks.of(events)
            if data or not begun:
                begun = True
                yield data
        yield chunks.end()
    except Exception as error:
        if not begun:
            raise
        yield sse(openai_body(service.told(error)))
