"""What the engine does with the models of the `afm-2025-device` study: work of a prompt, guesses of a draft, answers held
to a form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from orchard.core.seeds import fold
from orchard.generate import Engine, Request, Sampling
from orchard.generate.constraint import Constraint
from orchard.generate.lowering import lower
from orchard.generate.request import Answer
from orchard.generate.speculative import Speculation
from orchard.models.language import Decoder
from orchard.ops.plan.steps import Attend, Gated, Head, Linear, Narrow, Plan
from orchard.studies._afm_text import ids_of, language, tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "town": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,14}$"},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "town", "tags"],
    "additionalProperties": False,
}

GUESSES = 4
"""Tokens that a draft guesses for each call of the model."""


def prefill_flops(plan: Plan, tokens: int) -> int:
    """Multiplications and additions of reading a prompt, by the engine's own steps. After `Narrow` only one row is left: the last
    token's, whose scores are wanted. Lookups, norms and rotations are not counted."""
    rows, total = tokens, 0
    for step in plan.steps:
        if isinstance(step, Narrow):
            rows = 1
        elif isinstance(step, Linear):
            total += 2 * rows * sum(each.matrix.rows * each.matrix.cols for each in step.outputs)
        elif isinstance(step, Gated):
            total += 2 * rows * sum(each.rows * each.cols for each in (step.gate, step.up))
        elif isinstance(step, Attend):
            pairs = tokens * (tokens + 1) // 2 if rows == tokens else tokens
            total += 4 * step.heads * step.dim * pairs
        elif isinstance(step, Head):
            total += 2 * rows * step.matrix.rows * step.matrix.cols
    return total


def runner_of(model: Decoder) -> Any:
    """The native engine where there is one and the model has a plan for all of it, otherwise torch: then the answers of one call
    may differ from those of another in ties."""
    from orchard.generate.torch_forward import runner_of as in_torch
    from orchard.ops.kernels.native import library

    if library() is None:
        return in_torch(model)
    from orchard.generate.native import NativeRunner

    plan = lower(model.cpu())
    return NativeRunner(plan) if plan.whole else in_torch(model)


@dataclass(frozen=True)
class Guessed:
    """What speculation did: answers that differ from those without it, and tokens for each call of the model."""

    answers: int
    different: int
    per_call: float
    per_call_paying: float
    """Where the engine itself says how many guesses are worth their time: then the clock decides."""
    native: bool


def speculated(model: Decoder, draft: Decoder, prompts: int, tokens: int, seed: int) -> Guessed:
    """Greedy answers with and without a draft, to beginnings of texts that nobody learnt from: `GUESSES` for each call, and as
    many as pay."""
    target, small = runner_of(model), runner_of(draft)
    plain = Engine(target, tokenizer(), prefix_bytes=0)
    quick = Engine(target, tokenizer(), prefix_bytes=0, draft=small)
    asked = [_beginning(fold(seed, "prompt", number)) for number in range(prompts)]
    one = plain.answer([Request(ids, max_tokens=tokens, seed=0) for ids in asked])
    different, found = 0, {}
    for length in (GUESSES, 0):
        way = Speculation("draft", length=length)
        two = quick.answer([Request(ids, max_tokens=tokens, seed=0, speculation=way) for ids in asked])
        different += sum(a.ids != b.ids for a, b in zip(one, two, strict=True))
        found[length] = sum(len(each.ids) for each in two) / max(sum(each.usage.calls for each in two), 1)
    native = type(target).__name__ == "NativeRunner"
    return Guessed(2 * prompts, different, per_call=found[GUESSES], per_call_paying=found[0], native=native)


def _beginning(seed: int, least: int = 24) -> tuple[int, ...]:
    return tuple(ids_of(language().text(seed, least)).tolist())


@dataclass(frozen=True)
class Guided:
    """What a schema did: answers that are valid, and calls of the model with and without tokens that need none."""

    valid: int
    answers: int
    calls: int
    calls_of_all: int
    free_valid: int
    """Answers that were valid without being held to anything."""


def guided(model: Decoder, answers: int, seed: int) -> Guided:
    """Records, drawn at temperature 1: held to the schema, held to it with every token run through the model (as anybody who
    wants log-probabilities has it), and written freely."""
    engine = Engine(runner_of(model), tokenizer(), prefix_bytes=0)
    begin = tuple(ids_of("\n").tolist())
    held = Constraint.json_schema(SCHEMA)
    sampling = Sampling(temperature=1.0)

    def ask(**extra: Any) -> list[Answer]:
        return engine.answer(
            [
                Request(begin, max_tokens=120, sampling=sampling, seed=fold(seed, number), stop=("\n",), **extra)
                for number in range(answers)
            ]
        )

    quick, slow, free = ask(constraint=held), ask(constraint=held, logprobs=0), ask()
    return Guided(
        valid=sum(valid(each.text) for each in quick),
        answers=answers,
        calls=sum(each.usage.calls for each in quick),
        calls_of_all=sum(each.usage.calls for each in slow),
        free_valid=sum(valid(each.text) for each in free),
    )


def valid(text: str) -> bool:
    """Whether a text is a record of the schema, checked by hand: the judge must not be what wrote it."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or list(found) != ["name", "age", "town", "tags"]:
        return False
    names, tags, age = (found["name"], found["town"]), found["tags"], found["age"]
    sound = all(
        isinstance(each, str) and _word(each[:1].lower() + each[1:], 12) and each[:1].isupper() for each in names
    )
    listed = isinstance(tags, list) and 1 <= len(tags) <= 2 and all(isinstance(t, str) and _word(t, 14) for t in tags)
    return sound and listed and isinstance(age, int) and not isinstance(age, bool) and 1 <= age <= 99


def _word(text: str, most: int) -> bool:
    return 1 <= len(text) <= most and text.isascii() and text.isalpha() and text.islower()
