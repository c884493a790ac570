"""`POST /v1/completions`: texts gone on with as they stand, with log-probabilities of prompts, as evaluation programs ask for."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.openai.answers import head, usage_of
from orchard.serve.openai.completions_body import CompletionBody, completions_of
from orchard.serve.openai.completions_stream import Marks, TextChunks, all_events, groups, text_events
from orchard.serve.openai.fields import noted
from orchard.serve.openai.logprobs import Spell, joined, speller
from orchard.serve.service import Ask, Service
from orchard.serve.sse import EventStream
from orchard.session.turn import Done, Text


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/completions", openapi_extra=described(CompletionBody), response_model=None)
    async def completions(request: Request) -> Response:
        """Texts gone on with."""
        body = await read(request, CompletionBody)
        jobs = completions_of(body, service.settings.limits)
        spell = None if body.logprobs is None else await service.speaking(body.model, speller)
        streamed = bool(body.stream)
        ask = service.ask(request, body.model, jobs, user=body.user, priority=body.priority, stream=streamed)
        headers = noted(body, [])
        if streamed:
            chunks = TextChunks(body, ask, spell, body.n or 1)
            return await EventStream.begun(request, text_events(service, groups(ask, service), chunks), headers)
        answer = await unless_gone(request, _whole(service, ask, body, spell))
        return Response(json.dumps(answer), media_type="application/json", headers=headers)

    return routes


async def _whole(service: Service, ask: Ask, body: CompletionBody, spell: Spell | None) -> dict[str, Any]:
    count = len(ask.jobs)
    marks = Marks(body, ask, spell)
    texts: list[list[str]] = [[] for _ in range(count)]
    shapes: list[list[dict[str, list[Any]]]] = [[] for _ in range(count)]
    ends = [Done("stop")] * count
    async for events in all_events(service, groups(ask, service)):
        for index, event in events:
            shape = marks.shape(index, event)
            if shape is not None:
                shapes[index].append(shape)
            if isinstance(event, Text):
                texts[index].append(event.delta)
            elif isinstance(event, Done):
                ends[index] = event
    used = [end.usage for end in ends]
    choices = [
        {
            "text": "".join(texts[index]),
            "index": index,
            "logprobs": joined(shapes[index]) if body.logprobs is not None else None,
            "finish_reason": ends[index].finish,
        }
        for index in range(count)
    ]
    read_once = used[:: body.n or 1]
    return head("cmpl", "text_completion", ask.model) | {"choices": choices, "usage": usage_of(read_once, used)}
