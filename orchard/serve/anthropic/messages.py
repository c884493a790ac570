"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol over the models of this server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from orchard.serve.anthropic.messages_body import CountBody, MessagesBody
from orchard.serve.anthropic.messages_stream import Wire, Writer, folded, stop_in
from orchard.serve.anthropic.messages_turn import Prepared, counted, turn_of
from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.errors import ApiError, anthropic_body
from orchard.serve.openai.fields import noted
from orchard.serve.run import Run
from orchard.serve.service import Ask, Service
from orchard.serve.sse import EventStream, sse, together
from orchard.session.turn import Done, Message, Turn


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["anthropic"])

    @routes.post("/v1/messages", openapi_extra=described(MessagesBody), response_model=None)
    async def messages(request: Request) -> Response:
        """An answer to a conversation."""
        return await _answer(service, request)

    @routes.post("/v1/messages/count_tokens", openapi_extra=described(CountBody), response_model=None)
    async def count_tokens(request: Request) -> Response:
        """The tokens of a conversation, without an answer."""
        return await _count(service, request)

    return routes


async def _answer(service: Service, request: Request) -> Response:
    body = await read(request, MessagesBody)
    reasons = await service.speaking(body.model, lambda executor: "reasoning" in executor.capabilities)
    prepared = turn_of(body, service.settings.limits, reasons=reasons)
    user = body.metadata.user_id if body.metadata is not None else None
    ask = service.ask(request, body.model, [prepared.turn], user=user)
    headers = noted(body, list(prepared.ignored))
    if body.stream:
        return await EventStream.begun(request, _streamed(service, ask, prepared), headers)
    answer = await unless_gone(request, _whole(service, ask, prepared))
    # Arguments of a call may spell half a character: escaped, it is still JSON.
    return Response(json.dumps(answer), media_type="application/json", headers=headers)


async def _whole(service: Service, ask: Ask, prepared: Prepared) -> Wire:
    writer = Writer(ask.model, prepared.turn, thoughts=prepared.thoughts)
    events = writer.start(0)
    async with service.run(ask) as run:
        async for _, event in run:
            events += await _ended(run, writer, event) if isinstance(event, Done) else writer.take(event)
    return folded(events)


async def _streamed(service: Service, ask: Ask, prepared: Prepared) -> AsyncGenerator[bytes, None]:
    writer = Writer(ask.model, prepared.turn, thoughts=prepared.thoughts)
    # Counted while the answer is being begun: clients want the number at once, and the engine tells it at the end.
    counting = asyncio.ensure_future(_tokens_or_none(service, ask.model, prepared.turn))
    try:
        async with service.run(ask) as run:
            yield _written(writer.start(await counting))
            try:
                async for some in together(run):
                    events: list[Wire] = []
                    for _, event in some:
                        events += await _ended(run, writer, event) if isinstance(event, Done) else writer.take(event)
                    if events:
                        yield _written(events)
            except ApiError as error:
                yield sse(anthropic_body(error), "error")
    finally:
        counting.cancel()


def _written(events: list[Wire]) -> bytes:
    return b"".join(sse(event, event["type"]) for event in events)


async def _ended(run: Run, writer: Writer, done: Done) -> list[Wire]:
    """How it ended; where that may have been a stop string, the last tokens are looked at for which."""
    stops, ids = run.ask.jobs[0].stop, list(writer.tail)
    if done.finish != "stop" or not stops or not ids:
        return writer.end(done, None)
    spelled = await run.service.speaking(
        run.ask.model, lambda executor: executor.decode(ids) if hasattr(executor, "decode") else ""
    )
    return writer.end(done, stop_in(spelled, stops))


async def _count(service: Service, request: Request) -> Response:
    body = await read(request, CountBody)
    prepared = counted(body, service.settings.limits)
    tokens = await unless_gone(request, _tokens(service, body.model, prepared.turn))
    return JSONResponse({"input_tokens": tokens}, headers=noted(body, list(prepared.ignored)))


async def _tokens(service: Service, model: str, turn: Turn) -> int:
    shown = () if turn.tool_mode == "disallowed" else turn.tools
    if not turn.begin:
        return await service.count(model, turn.messages, shown)
    messages = (*turn.messages, Message("assistant", turn.begin))
    return await service.speaking(model, lambda executor: executor.count(messages, shown, answer=False))


async def _tokens_or_none(service: Service, model: str, turn: Turn) -> int:
    try:
        return await _tokens(service, model, turn)
    except ApiError:  # the answer says what is wrong
        return 0
