"""`POST /v1/chat/completions`: OpenAI's chat, whole or as a stream."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.openai.answers import head, usage_of
from orchard.serve.openai.chat_body import ChatBody, chat_of
from orchard.serve.openai.chat_stream import ChatChunks, chat_events, finish_of
from orchard.serve.openai.fields import noted
from orchard.serve.openai.logprobs import ChatLogprobs, Spell, speller
from orchard.serve.service import Ask, Service
from orchard.serve.sse import EventStream
from orchard.session.turn import Call, Done, Event, Reasoning, Text


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatBody), response_model=None)
    async def chat(request: Request) -> Response:
        """An answer to a conversation."""
        body = await read(request, ChatBody)
        reasons, spell = await _abilities(service, body)
        asked = chat_of(body, service.settings.limits, reasons=reasons)
        user = body.safety_identifier or body.user
        streamed = bool(body.stream)
        ask = service.ask(request, body.model, asked.turns, user=user, priority=body.priority, stream=streamed)
        headers = noted(body, asked.ignored)
        if streamed:
            return await EventStream.begun(request, chat_events(service, ask, ChatChunks(body, ask, spell)), headers)
        answer = await unless_gone(request, _whole(service, ask, body, spell))
        return Response(json.dumps(answer), media_type="application/json", headers=headers)

    return routes


async def _abilities(service: Service, body: ChatBody) -> tuple[bool, Spell | None]:
    """Whether the model thinks, and what tells the bytes of its tokens; asked only where it matters."""
    if body.reasoning_effort is None and not body.logprobs:
        return False, None
    return await service.speaking(
        body.model, lambda executor: ("reasoning" in executor.capabilities, speller(executor))
    )


class Choice:
    """One answer, as its events come in."""

    def __init__(self, index: int, logprobs: ChatLogprobs | None) -> None:
        self.index = index
        self.done = Done("stop")
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[Call] = []
        self._logprobs = logprobs
        self._entries: list[dict[str, Any]] = []

    def add(self, event: Event) -> None:
        if isinstance(event, Text):
            self._said.append(event.delta)
            if self._logprobs is not None:
                self._entries += self._logprobs.entries(event)
        elif isinstance(event, Reasoning):
            self._thought.append(event.delta)
        elif isinstance(event, Call):
            self._calls.append(event)
        else:
            self.done = event

    def shape(self, *, legacy: bool) -> dict[str, Any]:
        said = "".join(self._said)
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self._calls]
            message["content"] = said or None
            if legacy:
                message["function_call"] = functions[0]
            else:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(self._calls, functions, strict=True)
                ]
        logprobs = None if self._logprobs is None else {"content": self._entries, "refusal": None}
        finish = finish_of(self.done, legacy=legacy)
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": finish}


async def _whole(service: Service, ask: Ask, body: ChatBody, spell: Spell | None) -> dict[str, Any]:
    def logprobs(place: int) -> ChatLogprobs | None:
        return ChatLogprobs(spell, stops=bool(ask.jobs[place].stop)) if body.logprobs else None

    choices = [Choice(place, logprobs(place)) for place in range(len(ask.jobs))]
    async with service.run(ask) as run:
        async for index, event in run:
            choices[index].add(event)
    used = [choice.done.usage for choice in choices]
    return {
        **head("chatcmpl", "chat.completion", ask.model),
        "choices": [choice.shape(legacy=body.legacy) for choice in choices],
        "usage": usage_of(used[:1], used),
    }
