"""A model behind an address that speaks OpenAI's chat protocol, for the same sessions as a model on this machine.

from orchard.session.executors.endpoint import EndpointExecutor
session = orchard.Session(model=EndpointExecutor("http://127.0.0.1:8000/v1", "my-model"))

Nothing is sent until a session asks for an answer. What an endpoint cannot promise is said: tokens are counted by an estimate
(`counts_by_estimate`), log-probabilities come without token ids, and a regular expression, choices or a grammar are refused.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from orchard.core.errors import UsageError
from orchard.session.errors import (
    AssetsUnavailableError,
    DecodingFailureError,
    ExceededContextWindowSizeError,
    FoundationModelsError,
)
from orchard.session.executors.endpoint_body import body_of, message_of, tool_of
from orchard.session.executors.endpoint_errors import Secrets, of_event, of_status
from orchard.session.executors.endpoint_http import Address, Exchange, Head
from orchard.session.executors.endpoint_reply import Reply
from orchard.session.executors.sse import EventReader
from orchard.session.turn import Capability, Event, ToolSpec, Turn
from orchard.text.messages import Message

CAPABILITIES: frozenset[Capability] = frozenset({"guided", "tools", "logprobs", "reasoning", "seed"})
KEY_VARIABLE = "ORCHARD_API_KEY"
LETTERS_A_TOKEN = 4
"""English text has about so many letters a token in most vocabularies; other languages and code have fewer."""
TOKENS_A_MESSAGE = 4
ASSUMED_CONTEXT = 131_072
MOST_ERROR = 2**16


class EndpointExecutor:
    """An `Executor` over `POST {base_url}/chat/completions`.

    `api_key`: None reads `ORCHARD_API_KEY`, and `OPENAI_API_KEY` for api.openai.com alone; "" sends none. `timeout`: seconds
    without a byte. `headers` are added to every request. `extra` are fields for the body, which have the last word; None takes
    a field out. `context_size`: what the model holds, where you know it; an endpoint does not say. `capabilities`: what it can
    do, where that is less than the protocol. A key is not sent in clear text to another machine unless `insecure` says so.
    """

    counts_by_estimate = True

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        context_size: int = ASSUMED_CONTEXT,
        capabilities: Collection[Capability] = CAPABILITIES,
        insecure: bool = False,
    ) -> None:
        self._address = Address.of(base_url)
        if not isinstance(model, str) or not model:
            raise UsageError(
                "the model of the endpoint has no name", hint="give the name that the endpoint knows it by"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise UsageError(f"timeout is {timeout!r}", hint="use seconds, above 0")
        if isinstance(context_size, bool) or not isinstance(context_size, int) or context_size < 1:
            raise UsageError(f"context_size is {context_size!r}", hint="use the tokens that the model holds")
        unknown = sorted(set(capabilities) - CAPABILITIES)
        if unknown:
            raise UsageError(
                f"an endpoint cannot do {', '.join(unknown)}", hint=f"of {', '.join(sorted(CAPABILITIES))}"
            )
        self._model, self._timeout, self._context = model, float(timeout), context_size
        self._capabilities = frozenset(capabilities)
        self._extra = _plain_json(extra or {})
        key = _key(api_key, self._address)
        self._headers = _headers(headers or {}, key)
        self._secrets = Secrets([key or "", *(value for value in (headers or {}).values() if len(value) >= 6)])
        if (key or headers) and not (self._address.secure or self._address.on_this_machine or insecure):
            hint = "use https, or insecure=True where you trust the network in between"
            raise UsageError(f"a key would go to {self._address.host} in clear text", hint=hint)

    @property
    def name(self) -> str:
        return self._model

    @property
    def context_size(self) -> int:
        return self._context

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._capabilities

    def __repr__(self) -> str:
        return f"EndpointExecutor({str(self._address)!r}, {self._model!r})"

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, answer: bool = True) -> int:
        """An estimate, rounded up: a quarter of the letters of the text, and a few tokens for every message."""
        texts = [_letters(message) for message in messages]
        shown = [len(json.dumps(tool_of(spec), ensure_ascii=False)) for spec in tools]
        tokens = sum(TOKENS_A_MESSAGE + math.ceil(letters / LETTERS_A_TOKEN) for letters in [*texts, *shown])
        return tokens + (TOKENS_A_MESSAGE if answer else 0)

    def prewarm(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> None:
        """Nothing: no request is sent that nobody asked for."""

    def run(self, turn: Turn, cancel: threading.Event) -> Iterator[Event]:
        """Events up to `Done`; see `Executor`."""
        about = self.count(turn.messages, turn.tools if turn.tool_mode != "disallowed" else ())
        if about > self._context:
            message = f"the conversation has about {about:,} tokens but the context holds {self._context:,}"
            raise ExceededContextWindowSizeError(message, tokens=about, limit=self._context)
        body = body_of(turn, self._model, self._extra, self._capabilities)
        return self._events(json.dumps(body, ensure_ascii=False).encode(), Reply(body.get("seed")), cancel)

    def _events(self, body: bytes, reply: Reply, cancel: threading.Event) -> Iterator[Event]:
        if cancel.is_set():
            yield reply.cancelled()
            return
        try:
            with Exchange(self._address, body, self._headers, self._timeout) as exchange:
                head = exchange.head(cancel)
                if head is not None:
                    yield from self._answer(exchange, head, reply, cancel)
            if cancel.is_set():
                yield reply.cancelled()
        except DecodingFailureError as error:
            error.raw = self._secrets.hide(error.raw)
            raise
        except FoundationModelsError as error:
            # Whatever the endpoint put into its words, the key does not leave by an error.
            error.message, error.args = self._secrets.hide(error.message), (self._secrets.hide(error.message),)
            raise

    def _answer(self, exchange: Exchange, head: Head, reply: Reply, cancel: threading.Event) -> Iterator[Event]:
        if head.status != 200:
            said = _whole(exchange, cancel, MOST_ERROR)
            if not cancel.is_set():
                raise of_status(head.status, said, head.retry_after, str(self._address), self._model, self._secrets)
            return
        if head.kind == "application/json":  # a whole answer where a stream was asked for
            found: Iterator[str] = iter([_whole(exchange, cancel, None)])
        else:
            found = self._stream(exchange, head, cancel)
        for data in found:
            if cancel.is_set():
                return
            if data.strip() == "[DONE]":
                reply.finish = reply.finish or "stop"
                break
            error = of_event(data, str(self._address), self._model, self._secrets)
            if error is not None:
                raise error
            for event in reply.read(data):
                if cancel.is_set():
                    return
                yield event
        if cancel.is_set():
            return
        if reply.finish is None:
            hint = "try again; what came of it is not in the transcript"
            raise AssetsUnavailableError(f"{self._address} hung up in the middle of the answer", hint=hint)
        yield from reply.end()

    def _stream(self, exchange: Exchange, head: Head, cancel: threading.Event) -> Iterator[str]:
        if head.kind != "text/event-stream":
            start = _whole(exchange, cancel, 1000)
            if cancel.is_set():
                return
            hint = "check the address: it mostly ends in /v1"
            what = head.kind or "something without a type"
            raise DecodingFailureError(f"{self._address} sent {what[:100]} instead of a stream", raw=start, hint=hint)
        reader = EventReader()
        for chunk in exchange.chunks(cancel):
            yield from reader.push(chunk)
        for last in reader.finish():
            if _is_whole(last):  # half a chunk is a connection that broke, not a server that errs
                yield last


def _whole(exchange: Exchange, cancel: threading.Event, most: int | None) -> str:
    """The rest of the body as text. With `most` it is only to show, so the beginning will do, also of one that breaks off."""
    data = bytearray()
    try:
        for chunk in exchange.chunks(cancel):
            data += chunk
            if most is not None and len(data) > most:
                break
    except FoundationModelsError:
        if most is None:
            raise
    return bytes(data[:most]).decode("utf-8", "replace")


def _is_whole(data: str) -> bool:
    if data.strip() == "[DONE]":
        return True
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _letters(message: Message) -> int:
    wire = message_of(message)
    calls = wire.get("tool_calls")
    return len(message.content) + (len(json.dumps(calls, ensure_ascii=False)) if calls else 0)


def _key(given: str | None, address: Address) -> str | None:
    """The key to send. One that was set for OpenAI goes nowhere else."""
    if given is None:
        given = os.environ.get(KEY_VARIABLE)
        if not given and address.secure and address.host == "api.openai.com":
            given = os.environ.get("OPENAI_API_KEY")
    if given is not None and not isinstance(given, str):
        raise UsageError("api_key is not a text", hint=f"give the key, or set {KEY_VARIABLE}")
    if given and not (given.isascii() and given.isprintable() and " " not in given):
        raise UsageError("api_key holds a space or a control character", hint="was a line end copied with it?")
    return given or None


def _headers(given: Mapping[str, str], key: str | None) -> dict[str, str]:
    for name, value in given.items():
        fine = isinstance(name, str) and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not fine or not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} cannot be sent", hint="names and values are plain ASCII texts")
    ours = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "orchard",
        "Connection": "close",
    }
    if key:
        ours["Authorization"] = f"Bearer {key}"
    replaced = {name.lower() for name in given}
    return {name: value for name, value in ours.items() if name.lower() not in replaced} | dict(given)


def _plain_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that later changes of the caller's cannot reach."""
    try:
        copied = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra is no JSON: {error}", hint="use texts, numbers, lists and dicts") from error
    if not isinstance(copied, dict):
        raise UsageError("extra is not a dict", hint='give fields of the body, such as {"user": "me"}')
    return copied
