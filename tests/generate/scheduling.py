"""What tests of the scheduler share: engines over tiny models, native and in torch, and requests of every sort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchard.generate import Answer, Engine, Request, Sampling
from orchard.generate.constraint import Constraint
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.torch_forward import TorchRunner
from orchard.text.tokenizer import Tokenizer

CONTEXT = 2048
KINDS = ("native", "torch")


def runner_of(kind: str, decoder: Callable[..., Any], **options: Any) -> Any:
    """A runner with one variant, "other": the same shape with other weights."""
    models = [decoder(context=CONTEXT, seed=seed, **options) for seed in (1, 2)]
    if kind == "native":
        one, other = (NativeRunner(lower(model), threads=1, decoder=lambda model=model: model) for model in models)  # type: ignore[misc]
        one.add_variant("other", other)
        return one
    first, second = TorchRunner(models[0]), TorchRunner(models[1])
    first.add_variant("other", second)
    return first


def mixed_requests(count: int, seed: int = 0, *, longest: int = 150, most: int = 24) -> list[Request]:
    """Different in everything: prompts (some begin alike), samplers, grammars, stops, logprobs, lengths, variants."""
    random = np.random.default_rng(seed)
    shared = tuple(random.integers(0, 256, longest).tolist())
    samplings = [
        Sampling(),
        Sampling(temperature=0.9, top_p=0.95),
        Sampling(temperature=1.2, top_k=40, min_p=0.01),
        Sampling(temperature=0.7, repetition_penalty=1.2),
    ]
    constraints = [None, None, Constraint.regex("[a-z]{3}-[0-9]{2,12}"), Constraint.choices(["the band", "the other"])]
    requests = []
    for place in range(count):
        own = tuple(random.integers(0, 256, int(random.integers(1, longest))).tolist())
        begin = shared[: int(random.integers(0, longest))] if place % 3 == 0 else ()
        constraint = constraints[place % 4]
        requests.append(
            Request(
                (*begin, *own),
                max_tokens=int(random.integers(1, most)),
                sampling=samplings[int(random.integers(4))],
                stop=("e", "\x00\x01") if place % 5 == 1 and constraint is None else (),
                seed=place,
                logprobs=2 if place % 7 == 3 else None,
                constraint=constraint,
                adapter="other" if place % 4 == 1 else None,
            )
        )
    return requests


def alone(runner: Any, tokenizer: Tokenizer, requests: Sequence[Request], **options: Any) -> list[Answer]:
    """The answers of requests that have an engine to themselves, one after another, nothing kept in between."""
    engine = Engine(runner, tokenizer, prefix_bytes=0, **options)
    return [engine.answer([request])[0] for request in requests]


def told(answer: Answer) -> tuple[Any, ...]:
    """All of an answer but for what it cost."""
    return answer.ids, answer.text, answer.finish, answer.logprobs, answer.seed, answer.error


def all_told(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    return [told(answer) for answer in answers]
