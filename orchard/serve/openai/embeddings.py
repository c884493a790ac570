"""`POST /v1/embeddings`: texts, or their tokens, as vectors of length 1."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.errors import invalid, unsupported
from orchard.serve.openai.fields import Exact, noted
from orchard.serve.service import Embedded, Service
from orchard.serve.settings import Limits

if TYPE_CHECKING:
    import numpy as np


class EmbeddingsBody(Exact):
    """`input`: a text, tokens, or a list of texts or of tokens. `truncate`: cut what is too long, which is refused otherwise."""

    model: str | None = Field(None, max_length=512)
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=2**20)
    user: str | None = None
    truncate: bool | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/embeddings", openapi_extra=described(EmbeddingsBody), response_model=None)
    async def embeddings(request: Request) -> Response:
        """Vectors of texts."""
        body = await read(request, EmbeddingsBody)
        texts = texts_of(body.input, service.settings.limits)
        ask = service.ask(request, body.model, (), user=body.user)
        found = await unless_gone(request, service.embed(ask, texts, truncate=bool(body.truncate)))
        own = found.vectors.shape[1]
        if body.dimensions is not None and body.dimensions != own:
            words = f"{ask.model} gives {own} numbers, and was not made to be cut to {body.dimensions}: leave it out"
            raise unsupported("dimensions", words)
        # Many numbers as text take their time: not on the event loop.
        text = await service.helped(lambda: _written(found, ask.model, body.encoding_format))
        return Response(text, media_type="application/json", headers=noted(body, []))

    return routes


def texts_of(given: str | Sequence[Any], limits: Limits) -> list[str | list[int]]:
    """One text or many, each as text or as tokens."""
    if isinstance(given, str):
        given = [given]
    elif given and all(type(item) is int for item in given):
        given = [list(given)]
    if not given:
        raise invalid("input: it is empty: give a text, or a list of texts", "input")
    if len(given) > limits.inputs:
        raise invalid(f"input: {len(given):,} texts are more than {limits.inputs:,}: send several requests", "input")
    for place, item in enumerate(given):
        tokens = isinstance(item, list) and all(type(token) is int for token in item)
        if not item or not (isinstance(item, str) or tokens):
            words = f"input.{place}: give a text that is not empty, or a list of token ids"
            raise invalid(words, f"input.{place}")
    return list(given)


def _written(found: Embedded, model: str, form: str | None) -> str:
    data = [
        {"object": "embedding", "index": place, "embedding": _numbers(vector, form)}
        for place, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json.dumps({"object": "list", "model": model, "data": data, "usage": usage})


def _numbers(vector: np.ndarray, form: str | None) -> str | list[float]:
    """base64: the bytes of float32, lowest first."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
