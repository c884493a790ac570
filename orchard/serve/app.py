"""The app: routes of every protocol over one service, errors in the protocol's shape, and the end of it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orchard.core.version import VERSION
from orchard.serve import description
from orchard.serve.errors import ApiError, body_for
from orchard.serve.record import Record
from orchard.serve.security import Security
from orchard.serve.service import Service
from orchard.serve.settings import Settings

ROUTES = (
    "orchard.serve.openai.models",
    "orchard.serve.openai.chat",
    "orchard.serve.openai.completions",
    "orchard.serve.openai.responses",
    "orchard.serve.openai.embeddings",
    "orchard.serve.anthropic.messages",
    "orchard.serve.tokenize",
)
GONE = 499
"""The status that is noted for clients who hung up; nobody receives it."""


def create_app(settings: Settings) -> FastAPI:
    """`app.state.service` is the service behind it. The default model is loaded in the background when the app starts."""
    service = Service(settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load_default(service))
        try:
            yield
        finally:
            loading.cancel()
            service.close()

    app = FastAPI(title="Orchard", version=VERSION, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.failure = None
    for name in (*ROUTES, *(("orchard.serve.static",) if settings.page else ())):
        app.include_router(import_module(name).router(service))
    app.include_router(description.router(app))
    _add_states(app, service)
    _add_errors(app)
    app.add_middleware(Security, settings=settings)
    app.add_middleware(Record, service=service)
    return app


async def _load_default(service: Service) -> None:
    try:
        service.hub.give(await service.take(service.hub.default))
    except ApiError as error:
        service.metrics.log.error("the default model cannot be loaded: %s", error.message)


def _add_states(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["state"])
    async def health() -> dict[str, Any]:
        """Whether the server lives."""
        return {"status": "draining" if service.gate.draining else "ok", "version": VERSION}

    @app.get("/ready", tags=["state"])
    async def ready() -> Response:
        """Whether it takes requests: 503 while the default model is being loaded, and while it is stopping."""
        cards = await service.helped(service.hub.cards)
        loaded = any(card.loaded for card in cards)
        state = "draining" if service.gate.draining else "ready" if loaded else "loading"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", tags=["state"], response_class=Response)
    async def metrics() -> Response:
        """Numbers in Prometheus' text form."""
        text = await service.helped(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    def told(request: Request, error: ApiError) -> Response:
        body = body_for(request.url.path, error, request.scope.get("orchard.request"))
        return JSONResponse(body, error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return told(request, error)

    @app.exception_handler(RequestValidationError)
    async def misshapen(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return told(request, ApiError(400, "invalid_request", f"{place}: {first['msg']}", param=place or None))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        words = {404: f"there is nothing at {request.url.path[:200]}: /docs lists what there is"}
        words[405] = f"{request.method} is not what {request.url.path[:200]} takes: /docs lists what there is"
        codes = {404: "not_found", 405: "method_not_allowed"}
        message = words.get(error.status_code, str(error.detail))
        found = told(request, ApiError(error.status_code, codes.get(error.status_code, "invalid_request"), message))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)
