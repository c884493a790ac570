"""A text that is gone on with as it stands: no roles, no template. What `/v1/completions` of a server asks for.

A prompt is text or token ids. Text is read as users' text is everywhere: what looks like a control token is only letters. The
token that a model wants at the beginning of every text is put there by the tokenizer; ids are taken as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.request import Piece, Request, Sampling
from orchard.generate.rules import LogitBias
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.turn import Done, Event, Text, Usage

if TYPE_CHECKING:
    from orchard.session.model import Model


@dataclass(frozen=True)
class Completion:
    """Everything that the continuation of a text depends on."""

    prompt: str | tuple[int, ...]
    max_tokens: int = 16
    """0: nothing is to be written, where `echo` gives the prompt back."""
    echo: bool = False
    """The prompt is the beginning of the answer; with `logprobs`, what the model thought of its tokens too."""
    constraint: Constraint | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    priority: int = 0


def complete(model: Model, asked: Completion, cancel: threading.Event) -> Iterator[Event]:
    """Events up to `Done`. What cannot be answered raises here, before any event."""
    tokenizer = model.tokenizer
    ids = tuple(text_ids(model, asked.prompt)) if isinstance(asked.prompt, str) else asked.prompt
    if asked.max_tokens < 0 or (asked.max_tokens == 0 and not asked.echo):
        raise UsageError(f"max_tokens is {asked.max_tokens}", hint="use a whole number from 1, or 0 together with echo")
    if not ids:
        raise UsageError("the prompt has no tokens", hint="give some text to go on with")
    if len(ids) >= model.context:
        raise ExceededContextWindowSizeError(tokens=len(ids), limit=model.context)
    scored = asked.logprobs if asked.echo else None
    request = Request(
        ids,
        max(asked.max_tokens, 1),
        asked.sampling,
        stop=asked.stop,
        seed=asked.seed,
        logprobs=asked.logprobs if asked.max_tokens else None,
        prompt_logprobs=scored,
        rules=bias_rules(asked.bias, model.engine.model.config.vocab),
        constraint=asked.constraint,
        priority=asked.priority,
    ).seeded()
    if asked.max_tokens == 0 and scored is None:
        return iter(
            [Text(tokenizer.decode(ids, skip_special=False), ids), Done("length", Usage(len(ids)), request.seed)]
        )
    return _events(model, asked, request, cancel)


def text_ids(model: Model, text: str) -> list[int]:
    """The tokens of a text that stands by itself."""
    return model.tokenizer.encode(text, bos=model.tokenizer.add_bos) if text else []


def bias_rules(bias: Mapping[int, float], vocab: int) -> tuple[LogitBias, ...]:
    wrong = next((token for token in bias if not 0 <= token < vocab), None)
    if wrong is not None:
        raise UsageError(f"a bias is asked for token {wrong}", hint=f"token ids go from 0 to {vocab - 1:,}")
    return (LogitBias(bias),) if bias else ()


def _events(model: Model, asked: Completion, request: Request, cancel: threading.Event) -> Iterator[Event]:
    ids, tokenizer = request.ids, model.tokenizer
    if asked.echo and request.prompt_logprobs is None:
        yield Text(tokenizer.decode(ids, skip_special=False), ids)
    scored = request.prompt_logprobs is not None
    with model.engine.stream(request, cancel=cancel) as stream:
        for piece in stream:
            if scored and not piece.forced:  # the first that the model was run for brings what it thought of the prompt
                scored = False
                yield Text(tokenizer.decode(ids, skip_special=False), ids, piece.prompt)
            if asked.max_tokens and (piece.text or piece.id is not None or piece.logprob is not None):
                yield _text(piece)
    answer, used = stream.answer, stream.answer.usage
    written = used.output if asked.max_tokens else 0
    finish = answer.finish if answer.finish != "error" else "stop"  # one request alone raises instead
    yield Done(
        finish if asked.max_tokens else "length", Usage(used.input, used.cached, written, 0, used.calls), answer.seed
    )


def _text(piece: Piece) -> Text:
    """The end token has no id here and adds no text, but what the model thought of it is told."""
    return Text(piece.text, () if piece.id is None else (piece.id,), () if piece.logprob is None else (piece.logprob,))
