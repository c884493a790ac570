"""Fields that chat and plain completions share, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from orchard.core.errors import OrchardError
from orchard.serve.bodies import IGNORED, Body, ignored_header, one_of
from orchard.serve.errors import api_error, invalid, unsupported
from orchard.serve.settings import Limits
from orchard.session.turn import Sampling

MOST_TOKENS = 2**24
LONGEST_NAME = 9
"""Digits of a token id."""


class Exact(Body):
    """No texts for numbers, no numbers for truth."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(Exact):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Nothing is ever padded here."""


class StructuredOutputs(Exact):
    """vLLM's newer word for its `guided_…` fields."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ResponseFormat(Exact):
    type: Annotated[str, one_of("text", "json_object", "json_schema")]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """With `json_object`, as llama.cpp takes it."""


class SchemaFormat(Exact):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Answers are always held to the schema."""


class Shared(Exact):
    model: str | None = Field(None, max_length=512)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=2**16)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Any = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_of(body: Shared) -> Sampling:
    """OpenAI's default temperature is 1. A `top_p` of 0 leaves the likeliest token, a `top_k` of 0 or -1 all of them."""
    top_k = body.top_k if body.top_k is not None and body.top_k > 0 else None
    top_p = body.top_p
    if top_p == 0:
        top_p, top_k = None, 1
    try:
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
        )
    except OrchardError as error:
        raise api_error(error) from error


def stops_of(body: Shared, limits: Limits) -> tuple[str, ...]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > limits.stops:
        raise invalid(f"stop: {len(given)} texts are more than the {limits.stops} that are allowed", "stop")
    for text in given:
        if not text or len(text) > limits.stop_chars:
            words = f"stop: a text of {len(text)} characters; use 1 to {limits.stop_chars} characters each"
            raise invalid(words, "stop")
    return tuple(dict.fromkeys(given))


def bias_of(body: Shared, limits: Limits) -> dict[int, float]:
    given = body.logit_bias or {}
    if len(given) > limits.bias:
        words = f"logit_bias: {len(given)} tokens are more than the {limits.bias} that are allowed"
        raise invalid(words, "logit_bias")
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= LONGEST_NAME):
            raise invalid(f"logit_bias: {key[:40]!r} is no token id: keys are ids of tokens as texts", "logit_bias")
        if not -100 <= value <= 100:
            raise invalid(f"logit_bias: {value:g} for token {key}: use a number from -100 to 100", "logit_bias")
        found[int(key)] = float(value)
    return found


def limited(tokens: int | None, limits: Limits, param: str) -> int | None:
    """New tokens of an answer, held to what the server allows."""
    if tokens is None:
        return limits.max_tokens
    if limits.max_tokens is not None and tokens > limits.max_tokens:
        words = f"{param}: {tokens:,} are more than this server writes: use {limits.max_tokens:,} or fewer"
        raise invalid(words, param)
    return tokens


def counted(body: Shared, most: int) -> int:
    """`n`, in bounds."""
    found = 1 if body.n is None else body.n
    if found > most:
        raise invalid(f"n: {found} answers are more than the {most} that are allowed", "n")
    return found


def seed_of(body: Shared, place: int) -> int | None:
    """The seeds of several answers to one question are neighbours."""
    return None if body.seed is None else body.seed + place


def refuse_streaming_options(body: Shared) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid(
            "stream_options: only for answers that are streamed: set stream, or leave it out", "stream_options"
        )


def refused(given: Any, param: str, why: str) -> None:
    """What would change the answer and cannot be done is refused; null is nothing."""
    if given is not None:
        raise unsupported(param, why)


def noted(body: Body, names: list[str]) -> dict[str, str]:
    """The header that names what had no effect: fields that nobody knows, and `names`."""
    header = ignored_header(body)
    both = [header[IGNORED]] if header else []
    return {IGNORED: ", ".join([*both, *names])} if both or names else {}
