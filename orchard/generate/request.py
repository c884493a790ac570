"""What goes into an engine and what comes out: plain frozen values, checked when they are made, without torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen
from orchard.core.seeds import fresh_seed

if TYPE_CHECKING:
    from orchard.generate.budget import Thinking
    from orchard.generate.constraint import Constraint
    from orchard.generate.protocol import Rule
    from orchard.generate.speculative.options import Speculation

Finish = Literal["stop", "length", "cancelled", "error"]
"""Why an answer ended: an end token or a stop string; no room left; the caller's wish; something that this request alone cannot
get over (broken scores, a rule that fails, no memory), where other answers of the same run could go on."""

MOST_TOKENS = 2**24
"""More than any model's context: a larger `max_tokens` is a mistake, not a wish."""
MOST_PRIORITY = 2**31


@frozen
class Sampling:
    """How the next token is chosen. Applied in this order: penalties, temperature, top_k, top_p, min_p."""

    temperature: float = 0.0
    """0: always the likeliest token (the lowest id among equals), whatever top_k, top_p and min_p say."""
    top_k: int | None = None
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose mass reaches this."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float | None = None
    """Tokens that occur in the prompt or the answer: positive scores are divided by this, negative multiplied."""
    presence_penalty: float | None = None
    """Taken off the scores of tokens that the answer has."""
    frequency_penalty: float | None = None
    """Taken off the scores of tokens as often as the answer has them."""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, "0 or more", lambda x: x >= 0)
        if self.top_k is not None and _whole("top_k", self.top_k) < 1:
            raise UsageError(f"top_k is {self.top_k}", hint="use a whole number from 1, or leave it out")
        if self.top_p is not None:
            _number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        if self.min_p is not None:
            _number("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        if self.repetition_penalty is not None:
            _number("repetition_penalty", self.repetition_penalty, "above 0", lambda x: x > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), "from -100 to 100", lambda x: abs(x) <= 100)


@frozen
class Request:
    """One prompt and how to answer it."""

    ids: tuple[int, ...]
    max_tokens: int = 256
    """At most so many new tokens; fewer where the model's context ends before (finish "length" in both cases)."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these to be complete in its text."""
    seed: int | None = None
    """None: a fresh one, reported in the answer."""
    logprobs: int | None = None
    """How many alternatives to report for each token; 0: only the chosen token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, all but the first; they come with the first token that the model chooses. Nothing
    of such a prompt is taken from a cache."""
    rules: tuple[Rule, ...] = ()
    """Further rules on the scores, applied before those of `sampling`, also when the temperature is 0."""
    constraint: Constraint | None = None
    """What the answer must match. Tokens that it leaves no choice about cost no run of the model (unless log-probabilities
    are asked for, which only the model knows)."""
    priority: int = 0
    """Higher ones go first where there is no room for all; equal ones in the order of their coming."""
    adapter: str | None = None
    """The name of a variant of the model (`runner.add_variant`); None: the model itself."""
    speculation: Speculation | None = None
    """How several tokens at a time are guessed and then checked; None: one after another."""
    thinking: Thinking | None = None
    """How much the answer may think before it comes to the point; a constraint then holds for what comes after."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _token_ids(self.ids))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "rules", tuple(self.rules))
        if not 1 <= _whole("max_tokens", self.max_tokens) <= MOST_TOKENS:
            raise UsageError(f"max_tokens is {self.max_tokens}", hint=f"use a whole number from 1 to {MOST_TOKENS:,}")
        if self.seed is not None:
            _whole("seed", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and _whole(name, value) < 0:
                raise UsageError(f"{name} is {value}", hint="use 0 or the number of alternatives to report")
        if not -MOST_PRIORITY <= _whole("priority", self.priority) <= MOST_PRIORITY:
            raise UsageError(f"priority is {self.priority}", hint=f"use a whole number up to {MOST_PRIORITY:,}")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise UsageError(f"adapter is {self.adapter!r}", hint="give the name of an adapter, or leave it out")
        if self.speculation is not None:
            from orchard.generate.speculative.options import Speculation  # few requests need them

            _of_kind("speculation", self.speculation, Speculation)
        if self.thinking is not None:
            from orchard.generate.budget import Thinking

            _of_kind("thinking", self.thinking, Thinking)

    def seeded(self) -> Request:
        """The same request with a seed."""
        return self if self.seed is not None else replace(self, seed=fresh_seed())


@frozen
class TokenLogprob:
    """How likely the model found a token: the natural logarithm of its own distribution (float32), before any rule.

    `top` are the likeliest tokens, best first, which need not include the chosen one.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class Usage:
    """Tokens of the prompt, and tokens written (the end token is not counted). `cached`: tokens of the prompt whose keys and
    values were still there from an earlier one; `calls`: how often the model was run for the tokens written."""

    input: int
    output: int
    cached: int = 0
    calls: int = 0


@frozen
class Piece:
    """What one step adds to one answer.

    `text` may be empty while half a character, or what could become a stop string, is held back. `id` is the new token;
    None in a last piece that adds none (an end token, a cancelled run, an error). The end token's `logprob` is still
    given. `finish` is set in the last piece only, and `error` says in words what finish "error" means.
    """

    text: str
    id: int | None
    finish: Finish | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None
    forced: bool = False
    """Whether a constraint left no choice about this token, so that the model was not run for it."""
    usage: Usage | None = None
    """Of the whole answer, in its last piece."""
    prompt: tuple[TokenLogprob, ...] = ()
    """What the model thought of the prompt, where that was asked for."""


@frozen
class Answer:
    """A finished answer. `ids` holds no end token; after a stop string it holds the tokens that spelled it, `text` does
    not. `logprobs` goes with `ids`, one each, or is None where none were asked for. `error` says what broke an answer of
    finish "error"; the rest is what it had until then."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def _number(name: str, value: Any, wanted: str, allowed: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not allowed(value):
        raise UsageError(f"{name} is {value!r}", hint=f"use a number {wanted}")


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}", hint="use a whole number")
    return value


def _of_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r}", hint=f"use {kind.__module__}.{kind.__name__}, or leave it out")


def _token_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        known = tuple(map(operator.index, ids))
    except TypeError as error:
        raise UsageError(f"ids are not token ids: {error}", hint="pass whole numbers, as `encode` gives") from error
    if not known:
        raise UsageError("the prompt has no tokens", hint="give at least one token id")
    if min(known) < 0:
        raise UsageError(f"token id {min(known)} is negative", hint="ids count from 0")
    return known


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"{string!r} cannot be a stop string", hint="a stop string has at least one character")
    return strings
