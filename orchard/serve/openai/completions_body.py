"""The body of `POST /v1/completions`, and the texts that it asks to be gone on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from orchard.serve.errors import ApiError, invalid, unsupported
from orchard.serve.openai.constraints import constraint_of
from orchard.serve.openai.fields import (
    Shared,
    bias_of,
    counted,
    limited,
    refuse_streaming_options,
    sampling_of,
    seed_of,
    stops_of,
)
from orchard.serve.settings import Limits
from orchard.session.completion import Completion

DEFAULT_TOKENS = 16
MOST_LOGPROBS = 5
MOST_ID = 2**31

Prompt = str | tuple[int, ...]
_IDS = {"type": "array", "items": {"type": "integer"}}
_FORMS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _IDS, {"type": "array", "items": _IDS}]


class CompletionBody(Shared):
    # Looked at by hand: a union would try every form on each of what may be a million ids.
    prompt: Annotated[Any, WithJsonSchema({"anyOf": _FORMS})] = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=0, le=2**16)
    metadata: dict[str, Any] | None = None


def completions_of(body: CompletionBody, limits: Limits) -> tuple[Completion, ...]:
    """One for every prompt and choice: all choices of the first prompt, then those of the next. Raises `ApiError` and nothing
    else."""
    refuse_streaming_options(body)
    if body.suffix:
        raise unsupported("suffix", "texts are gone on with, not filled in: leave it out")
    choices = counted(body, limits.choices)
    if body.best_of is not None and body.best_of != choices:
        raise unsupported("best_of", f"all answers are given, none is chosen: leave it out, or use n ({choices})")
    prompts = prompts_of(body, limits)
    most = max(limits.choices, limits.prompts)
    if len(prompts) * choices > most:
        words = f"n: {len(prompts)} prompts with {choices} answers each are more than {most} answers: ask for fewer"
        raise invalid(words, "n")
    asked = Completion(
        prompt="",
        max_tokens=_tokens(body, limits),
        echo=bool(body.echo),
        constraint=constraint_of(body, limits),
        sampling=sampling_of(body),
        stop=stops_of(body, limits),
        logprobs=body.logprobs,
        bias=bias_of(body, limits),
        priority=body.priority or 0,
    )
    return tuple(
        replace(asked, prompt=prompt, seed=seed_of(body, place)) for prompt in prompts for place in range(choices)
    )


def prompts_of(body: CompletionBody, limits: Limits) -> list[Prompt]:
    given = body.prompt
    if given is None or given == "" or given == []:
        raise invalid("prompt: there is none: give a text to go on with, or token ids", "prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _wrong("prompt")
    if type(given[0]) is int:
        return [_ids(given, "prompt")]
    if len(given) > limits.prompts:
        words = f"prompt: {len(given)} prompts are more than the {limits.prompts} that are allowed in one request"
        raise invalid(words, "prompt")
    if len({type(one) for one in given}) > 1:
        raise _wrong("prompt")
    return [_one(one, f"prompt.{place}") for place, one in enumerate(given)]


def _one(given: Any, place: str) -> Prompt:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given:
        return _ids(given, place)
    raise (
        invalid(f"{place}: a prompt without tokens: give some to go on with", place)
        if given in ("", [])
        else _wrong(place)
    )


def _ids(given: list[Any], place: str) -> tuple[int, ...]:
    wrong = next((token for token in given if type(token) is not int or not 0 <= token < MOST_ID), None)
    if wrong is not None:
        raise invalid(f"{place}: holds something that is no token id: use whole numbers from 0", place)
    return tuple(given)


def _wrong(place: str) -> ApiError:
    return invalid(f"{place}: give a text, a list of texts, a list of token ids, or a list of such lists", place)


def _tokens(body: CompletionBody, limits: Limits) -> int:
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 only together with echo: use a whole number from 1", "max_tokens")
    if body.max_tokens is None:
        return min(DEFAULT_TOKENS, limits.max_tokens or DEFAULT_TOKENS)
    return limited(body.max_tokens, limits, "max_tokens") or 0
