"""A step's training: the model as it is now learns what the original gives to every next token."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orchard.core.seeds import fold
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Plain
from orchard.nn.formats.learned_once import forget, once
from orchard.nn.linear import Weight
from orchard.objectives.distill import Distill
from orchard.recipes.compressing.step import Lessons
from orchard.recipes.compressing.texts import Texts
from orchard.text.tokenizer import Tokenizer
from orchard.train.compiled import as_written, compiled
from orchard.train.ema import EMA
from orchard.train.optim import AdamW
from orchard.train.optim.groups import Rules
from orchard.train.schedule import Cosine
from orchard.train.step import Around
from orchard.train.trainer import Saving, Told, Trainer

DRAWN = 200
"""Points of a curve, about."""


@dataclass(frozen=True)
class Class:
    """Where and on what a step learns: the same for all steps of a run."""

    texts: Texts
    tokenizer: Tokenizer
    device: torch.device
    dtype: str
    rows: int
    """Rows of a step of the optimizer."""
    micro: int | None
    seed: int


@dataclass(frozen=True)
class Taught:
    """What training did."""

    tokens: int
    seconds: float
    curve: list[list[float]]
    """[tokens, KL to the original] on what was learnt from."""
    held: dict[str, list[list[float]]]
    """The same on what is held out, by kind."""


def joined(rounds: Sequence[Taught]) -> Taught:
    """Several trainings of one step as one."""
    found = Taught(0, 0.0, [], {})
    for one in rounds:
        curve = found.curve + _later(one.curve, found.tokens)
        held = {name: found.held.get(name, []) + _later(points, found.tokens) for name, points in one.held.items()}
        found = Taught(found.tokens + one.tokens, found.seconds + one.seconds, curve, held)
    return found


def _later(points: Sequence[list[float]], tokens: int) -> list[list[float]]:
    return [[at + tokens, value] for at, value in points]


def steps_for(tokens: int, where: Class) -> int:
    return max(1, math.ceil(tokens / (where.rows * where.texts.length)))


def teach(
    model: Decoder,
    original: Decoder,
    lessons: Lessons,
    tokens: int,
    where: Class,
    folder: Path,
    number: int | str,
    told: Iterable[Told] = (),
) -> Taught:
    """Train the model in its place, from the last checkpoint in the folder where there is one."""
    if lessons.whole:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    total = steps_for(tokens, where)
    seed = fold(where.seed, "lessons", number) % 2**31
    # On a GPU, to count what is learnt from would be to wait for it.
    objective = Distill.Config(states=lessons.states, skip=where.device.type != "cuda")
    settings = Trainer.Config(
        objective=objective,
        source=where.texts.source(where.rows, seed),
        steps=total,
        micro=where.micro,
        # No decay: weights that are nearly right are not to shrink.
        optim=AdamW.Config(lr=lessons.lr, decay=0.0, rules=Rules.Config(rates={"*.log_scale": lessons.scales})),
        schedule=Cosine.Config(warmup=max(1, total // 20), steps=total, floor=0.05),
        ema=None if lessons.average is None else EMA.Config(decay=lessons.average),
        dtype=where.dtype,
        compile=where.device.type == "cuda",
        seed=seed,
        save=Saving.Config(every=max(10, math.ceil(total / 10)), keep=1),
        held_out=where.texts.held_sources(where.rows),
        held_out_every=max(1, math.ceil(total / 8)),
        held_out_batches=4,
    )
    trainer: Trainer = settings.build(
        folder=folder,
        tokenizer=where.tokenizer,
        with_model=model.train(),
        with_objective=objective.build(teacher=_teacher(original, where)),
        device=where.device,
        around=_around(model, where),
    )
    try:
        report = trainer.run(told)
    finally:
        forget(model)
        as_written(model)
    if trainer.ema is not None:
        _keep_averages(model, trainer.ema)
    model.eval()
    each = where.rows * where.texts.length
    curves: dict[str, Any] = report.series
    held = {name: curves.get(f"held out, {name}", []) for name in where.texts.held}
    return Taught(
        tokens=trainer.tokens,
        seconds=trainer.seconds,
        curve=_by_tokens(curves.get("kl", []), each),
        held={name: _by_tokens(points, each) for name, points in held.items() if points},
    )


def _teacher(original: Decoder, where: Class) -> Decoder:
    """The original as it is read from: on a GPU a copy in what is computed in, with compiled blocks."""
    if where.device.type != "cuda":
        return original.to(where.device).eval().requires_grad_(False)
    narrow = torch.bfloat16 if where.dtype == "bfloat16" else torch.float32
    teacher = copy.deepcopy(original).to(where.device, narrow).eval().requires_grad_(False)
    compiled(teacher)
    return teacher


def _around(model: Decoder, where: Class) -> Around:
    """Weights that are learnt as they will be packed are made once a step, not once for every micro-batch, and packed ones once
    for all: as plain numbers, which a compiler need not know the formats of."""
    if all(isinstance(module.format, Plain) for module in model.modules() if isinstance(module, Weight)):
        return nullcontext
    return partial(once, model, torch.bfloat16 if where.dtype == "bfloat16" else None)


def _by_tokens(points: Sequence[Any], each: int) -> list[list[float]]:
    """[tokens, value] of a curve over steps, which has a value a step, or pairs of a step and a value."""
    pairs = [point if isinstance(point, list | tuple) else (number, point) for number, point in enumerate(points, 1)]
    thin = max(1, len(pairs) // DRAWN)
    return [[float(step) * each, float(value)] for step, value in pairs[thin - 1 :: thin] if value is not None]


@torch.no_grad()
def _keep_averages(model: Decoder, ema: EMA) -> None:
    for name, parameter in model.named_parameters():
        if name in ema.averages:
            parameter.copy_(ema.averages[name])
