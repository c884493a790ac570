"""What an endpoint says, chunk by chunk, as events of a turn.

Servers differ: some give calls without an index, some send a call in one piece and some letter by letter, some name thinking
`reasoning_content` and some `reasoning`, some answer whole where a stream was asked for. What all of them mean is read here;
what none can mean (a chunk that is no JSON, fields of another type) is a `DecodingFailureError` with the chunk in `raw`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from orchard.generate.request import TokenLogprob
from orchard.session.errors import DecodingFailureError, GuardrailViolationError, RefusalError
from orchard.session.turn import Call, Done, Event, Finish, Reasoning, Text, Usage

NO_ID = -1
"""The id of a token in log-probabilities of an endpoint: it gives the texts of tokens, not their ids."""
MOST_CALLS = 256
_FINISHES: dict[str, Finish] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}


class Reply:
    """The state of one answer. `read` gives events as they come; `end` gives the calls, whole, and `Done`."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._usage = Usage()
        self._calls: list[dict[str, str]] = []
        self._places: dict[Any, int] = {}
        self._refusal: list[str] = []
        self.finish: str | None = None

    def read(self, data: str) -> Iterator[Event]:
        """The events of one chunk."""
        chunk = _object(data, data, "a chunk")
        if chunk.get("usage") is not None:
            self._usage = _usage(_object(chunk["usage"], data, "usage"))
        for choice in _list(chunk.get("choices"), data, "choices"):
            choice = _object(choice, data, "a choice")
            if choice.get("index", 0) in (0, None):
                yield from self._choice(choice, data)

    def _choice(self, choice: dict[str, Any], data: str) -> Iterator[Event]:
        # `message` where the server answers whole although a stream was asked for
        delta = _object(choice.get("delta") or choice.get("message") or {}, data, "a delta")
        thought = _text(delta.get("reasoning_content") or delta.get("reasoning"), data, "reasoning")
        if thought:
            yield Reasoning(thought)
        said = _text(delta.get("content"), data, "content")
        logprobs = _logprobs(choice.get("logprobs"), data)
        if said or logprobs:
            yield Text(said, (), logprobs)
        refusal = _text(delta.get("refusal"), data, "refusal")
        if refusal:
            self._refusal.append(refusal)
        for part in _list(delta.get("tool_calls"), data, "tool_calls"):
            self._add(_object(part, data, "a tool call"), data)
        if choice.get("finish_reason") is not None:
            self.finish = _text(choice["finish_reason"], data, "finish_reason")

    def _add(self, part: dict[str, Any], data: str) -> None:
        """A piece of a call: known by its index, or by its id, or it goes on where the last one stopped."""
        index, id = part.get("index"), _text(part.get("id"), data, "the id of a call")
        key: Any = index if isinstance(index, int) else id or None
        if key is None and self._calls:
            place = len(self._calls) - 1
        else:
            place = self._places.setdefault(key, len(self._calls))
        if place == len(self._calls):
            if place >= MOST_CALLS:
                raise DecodingFailureError(f"the endpoint calls more than {MOST_CALLS} tools at once", raw=data[:1000])
            self._calls.append({"id": "", "name": "", "arguments": ""})
        call = self._calls[place]
        function = _object(part.get("function") or {}, data, "the function of a call")
        call["id"] = call["id"] or id
        name = _text(function.get("name"), data, "the name of a call")
        call["name"] = call["name"] if name == call["name"] else call["name"] + name  # some repeat it in every piece
        arguments = function.get("arguments")
        call["arguments"] += (
            json.dumps(arguments, ensure_ascii=False)
            if isinstance(arguments, dict)
            else _text(arguments, data, "the arguments of a call")
        )

    def end(self) -> Iterator[Event]:
        """Calls and the last event. A refusal, or an answer that the endpoint's own filter stopped, is raised."""
        if self._refusal:
            said = "".join(self._refusal)
            raise RefusalError(f"the endpoint refused: {said[:300]}", [said], hint="ask for something else")
        if self.finish == "content_filter":
            raise GuardrailViolationError(
                "the endpoint's own filter stopped the answer", hint="the filter is the endpoint's; ask in other words"
            )
        for call in self._calls:
            if not call["name"]:
                raise DecodingFailureError("the endpoint called a tool without a name", raw=json.dumps(call))
            yield Call(call["id"] or f"call_{secrets.token_hex(8)}", call["name"], call["arguments"] or "{}")
        finish: Finish = "tool_calls" if self._calls else _FINISHES.get(self.finish or "", "stop")
        yield Done(finish if finish != "tool_calls" or self._calls else "stop", self._usage, self._seed)

    def cancelled(self) -> Done:
        return Done("cancelled", self._usage, self._seed)


def _usage(told: dict[str, Any]) -> Usage:
    """Tokens as the endpoint counts them. It does not say how often its model ran; once a token is the usual."""

    def number(holder: Any, key: str) -> int:
        value = holder.get(key) if isinstance(holder, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0

    written = number(told, "completion_tokens")
    return Usage(
        input=number(told, "prompt_tokens"),
        cached=number(told.get("prompt_tokens_details"), "cached_tokens"),
        output=written,
        reasoning=number(told.get("completion_tokens_details"), "reasoning_tokens"),
        calls=written,
    )


def _logprobs(told: Any, data: str) -> tuple[TokenLogprob, ...]:
    if told is None:
        return ()
    found = []
    for token in _list(_object(told, data, "logprobs").get("content"), data, "logprobs"):
        token = _object(token, data, "a log-probability")
        rest = [_object(other, data, "a log-probability") for other in _list(token.get("top_logprobs"), data, "them")]
        top = tuple((_token_id(other), _likely(other, data)) for other in rest)
        found.append(TokenLogprob(_token_id(token), _likely(token, data), top))
    return tuple(found)


def _likely(token: dict[str, Any], data: str) -> float:
    value = token.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("a log-probability", data)
    return float(value)


def _token_id(token: dict[str, Any]) -> int:
    """vLLM can be asked to give `token_id:123` in place of a token's text; all others give no id."""
    text = str(token.get("token", ""))
    number = text.removeprefix("token_id:")
    return int(number) if number != text and number.isascii() and number.isdigit() and len(number) < 10 else NO_ID


def _object(value: Any, data: str, what: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _wrong(what, data) from None
    if not isinstance(value, dict):
        raise _wrong(what, data)
    return value


def _list(value: Any, data: str, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(what, data)
    return value


def _text(value: Any, data: str, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(what, data)
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # JSON can spell half a character; no text can hold it
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _wrong(what: str, data: str) -> DecodingFailureError:
    hint = "check that the address is that of an OpenAI-compatible chat endpoint"
    return DecodingFailureError(f"the endpoint sent {what} that cannot be read", raw=data[:1000], hint=hint)
