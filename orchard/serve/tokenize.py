"""`POST /tokenize` and `POST /detokenize`: how a model cuts a text, or a conversation, into tokens, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from orchard.serve.bodies import described, read
from orchard.serve.disconnect import unless_gone
from orchard.serve.errors import ApiError, invalid
from orchard.serve.openai.chat_messages import ChatMessage, messages_of
from orchard.serve.openai.chat_tools import ToolBody, tools_of
from orchard.serve.openai.fields import Exact, noted
from orchard.serve.openai.logprobs import shown
from orchard.serve.service import Service


class TokenizeBody(Exact):
    """A text, or a conversation. `content` and `prompt` are what llama-server and vLLM call the text."""

    model: str | None = Field(None, max_length=512)
    text: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolBody] | None = None
    spelled: bool | None = None
    """Whether each token is also told as text."""


class DetokenizeBody(Exact):
    model: str | None = Field(None, max_length=512)
    tokens: list[int]


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", openapi_extra=described(TokenizeBody), response_model=None)
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation as the model reads it."""
        body = await read(request, TokenizeBody)
        work = _tokens_of(body, service)
        found = await unless_gone(request, service.speaking(body.model, work))
        return JSONResponse(found, headers=noted(body, []))

    @routes.post("/detokenize", openapi_extra=described(DetokenizeBody), response_model=None)
    async def detokenize(request: Request) -> Response:
        """The text that tokens stand for."""
        body = await read(request, DetokenizeBody)
        text = await unless_gone(request, service.speaking(body.model, lambda executor: _text(executor, body.tokens)))
        return JSONResponse({"text": text, "content": text, "prompt": text}, headers=noted(body, []))

    return routes


def _tokens_of(body: TokenizeBody, service: Service) -> Any:
    """What the model is asked."""
    texts = [text for text in (body.text, body.content, body.prompt) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise invalid("give one of text and messages (content and prompt are other names for text)", "text")
    limits = service.settings.limits
    messages = messages_of(body.messages, limits) if body.messages is not None else ()
    tools, _ = tools_of(body.tools, None, limits)

    def asked(executor: Any) -> dict[str, Any]:
        ids = _conversation(executor, messages, tools) if messages else _has(executor, "encode")(texts[0])
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": executor.context_size}
        if body.spelled:
            found["spelled"] = [shown(data) for data in _has(executor, "spelled")(ids)]
        return found

    return asked


def _conversation(executor: Any, messages: Any, tools: Any) -> list[int]:
    tokenizer = _has(executor, "model").tokenizer
    ids: list[int] = executor.format.ids(tokenizer, messages, tools)
    return ids


def _text(executor: Any, ids: list[int]) -> str:
    vocab = _has(executor, "model").tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise invalid(f"tokens: {wrong} is no token of this model: ids go from 0 to {vocab - 1:,}", "tokens")
    text: str = executor.decode(ids)
    return text


def _has(executor: Any, name: str) -> Any:
    found = getattr(executor, name, None)
    if found is None:
        raise ApiError(
            400, "wrong_kind_of_model", "this model has no tokens of its own: name another one", param="model"
        )
    return found
