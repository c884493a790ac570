"""`POST /v1/responses`: OpenAI's responses, without a memory. Nothing of an answer is kept: clients send the whole input."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.errors import ApiError
from orchard.serve.openai.fields import noted
from orchard.serve.openai.logprobs import ChatLogprobs, speller
from orchard.serve.openai.responses_body import ResponsesBody
from orchard.serve.openai.responses_stream import Wire, Writer
from orchard.serve.openai.responses_turn import turn_of
from orchard.serve.service import Ask, Service
from orchard.serve.sse import EventStream, sse, together
from orchard.session.turn import Done


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"])
    limits = service.settings.limits

    @routes.post("/v1/responses", openapi_extra=described(ResponsesBody), response_model=None)
    async def responses(request: Request) -> Response:
        """An answer to a conversation, as items."""
        body = await read(request, ResponsesBody)
        reasons, spell = await service.speaking(
            body.model, lambda executor: ("reasoning" in executor.capabilities, speller(executor))
        )
        prepared = turn_of(body, limits, reasons=reasons)
        user = body.safety_identifier or body.user
        ask = service.ask(request, body.model, [prepared.turn], user=user, priority=body.priority)
        logprobs = ChatLogprobs(spell, stops=False) if prepared.turn.logprobs is not None else None
        writer = Writer(body, ask.model, logprobs)
        headers = noted(body, prepared.ignored)
        if body.stream:
            return await EventStream.begun(request, _streamed(service, ask, writer), headers)
        return _json(await unless_gone(request, _whole(service, ask, writer)), headers)

    @routes.post("/v1/responses/input_tokens", openapi_extra=described(ResponsesBody), response_model=None)
    async def input_tokens(request: Request) -> Response:
        """The tokens of a conversation, without an answer."""
        body = await read(request, ResponsesBody)
        prepared = turn_of(body, limits, reasons=False)
        turn = prepared.turn
        counting = service.count(body.model, turn.messages, () if turn.tool_mode == "disallowed" else turn.tools)
        tokens = await unless_gone(request, counting)
        return _json({"object": "response.input_tokens", "input_tokens": tokens}, noted(body, prepared.ignored))

    return routes


def _json(answer: Wire, headers: dict[str, str]) -> Response:
    return Response(json.dumps(answer), media_type="application/json", headers=headers)


async def _whole(service: Service, ask: Ask, writer: Writer) -> Wire:
    writer.start()
    async with service.run(ask) as run:
        async for _, event in run:
            if isinstance(event, Done):
                writer.end(event)
            else:
                writer.take(event)
    return writer.response


async def _streamed(service: Service, ask: Ask, writer: Writer) -> AsyncGenerator[bytes, None]:
    """What cannot be answered raises before the first bytes; what goes wrong later is told as `response.failed`."""
    async with service.run(ask) as run:
        yield _written(writer.start())
        try:
            async for some in together(run):
                events: list[Wire] = []
                for _, event in some:
                    events += writer.end(event) if isinstance(event, Done) else writer.take(event)
                if events:
                    yield _written(events)
        except ApiError as error:
            yield _written(writer.fail(error))


def _written(events: list[Wire]) -> bytes:
    return b"".join(sse(event, event["type"]) for event in events)
