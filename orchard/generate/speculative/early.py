"""Self-speculation: the model's own first layers guess, and the whole model judges (the idea: Zhang et al., arXiv 2309.08168;
Elhoushi et al., arXiv 2404.16710).

The short plan shares its tensors with the whole one, so it takes memory only for keys and values of its own. An ordinary model
was not trained to be read early: its guesses are poor until a head or the layers are trained for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchard.core.errors import UsageError
from orchard.generate.protocol import Runner
from orchard.ops.plan.early import early_plan, layer_count
from orchard.ops.plan.steps import Plan

if TYPE_CHECKING:
    from orchard.generate.native import NativeRunner

SHARE = 4
"""A draft has this part of the layers unless another number is asked for."""


def early_layers(runner: Runner, layers: int = 0) -> int:
    """How many layers guess: those that were asked for, or a quarter. `UsageError` where a runner has no such layers."""
    plan = getattr(runner, "plan", None)
    if not isinstance(plan, Plan) or not plan.whole:
        raise UsageError(
            "early layers can guess only where the whole model runs natively",
            hint='use Speculation(kind="lookup"), or a draft model; `orchard show MODEL --plan` says what runs in torch',
        )
    count = layer_count(plan)
    if layers > count:
        raise UsageError(f"{layers} early layers of a model that has {count}", hint=f"use 1 to {count}")
    return layers or max(1, count // SHARE)


def early_runner(runner: Runner, layers: int = 0) -> NativeRunner:
    """A runner of the first layers."""
    from orchard.generate.native import NativeRunner

    layers = early_layers(runner, layers)
    program = getattr(runner, "program", None)
    threads, level = getattr(program, "threads", None), getattr(program, "level", -1)
    plan = runner.plan  # type: ignore[attr-defined]  # `early_layers` has looked
    return NativeRunner(early_plan(plan, layers), threads=threads, level=level)
