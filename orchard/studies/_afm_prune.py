"""Half of the hidden units, chosen by learned masks and healed by distillation, against a small model from nothing. For
`afm-2024`.

All ways of learning read the same text for the same number of steps, those of the masks included. After the masks three
ways part: the teacher's whole distribution; nine parts of its likeliest token and one of the true one, as the paper has it;
the true one alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.objectives.base import Objective
from orchard.objectives.distill import Distill, TopScores
from orchard.objectives.lm import NextToken
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_ground import Ground
from orchard.transforms.prune import Prune

SEEDS = 3
NOTHING = -1e4
"""The logarithm of a probability that is as good as none."""


@dataclass(frozen=True, kw_only=True)
class Healing:
    """Steps of everything, those with masks, and rates."""

    steps: int = 100
    masks: int = 30
    rate: float = 1e-3
    mask_rate: float = 1e-3


class TopOne:
    """A teacher that says its likeliest token and nothing else."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __call__(self, ids: Tensor, context: Context) -> TopScores:
        with torch.no_grad():
            tokens = self.model(ids, context).argmax(-1, keepdim=True)
        zeros = torch.zeros(tokens.shape, device=ids.device)
        return TopScores(log_probs=zeros, tokens=tokens, rest=torch.full_like(zeros[..., 0], NOTHING))


def top_one(teacher: Decoder, weight: float) -> Objective:
    """`weight` parts of the teacher's likeliest token, the rest of the true one."""
    objective: Objective = Distill.Config(hard=1 - weight).build(teacher=TopOne(teacher))
    return objective


def measured(teacher: Decoder, ground: Ground, healing: Healing, seed: int) -> dict[str, Value | Scalar]:
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(SEEDS):
        for name, model in ways(teacher, ground, healing, fold(seed, "prune", number)).items():
            found.setdefault(name, []).append(ground_.held_out(model, ground, seed))
    losses = {name: [each["loss"] for each in told] for name, told in found.items()}
    right = {name: [each["accuracy"] for each in told] for name, told in found.items()}
    values: dict[str, Value | Scalar] = {}
    for name in found:
        values[f"prune_loss_{name}"] = ground_.mean(losses[name], "nats")
        values[f"prune_accuracy_{name}"] = ground_.mean([100 * each for each in right[name]], "%")

    def less(one: str, other: str, told: dict[str, list[float]], factor: float, unit: str) -> Value:
        return ground_.mean([factor * (a - b) for a, b in zip(told[one], told[other], strict=True)], unit)

    values |= {
        "prune_over_scratch": ground_.mean(
            [a / b for a, b in zip(losses["distilled"], losses["scratch"], strict=True)], "x", "loss over loss"
        ),
        "top1_loss_over_labels": less("top1", "labels", losses, 1.0, "nats"),
        "top1_accuracy_over_labels": less("top1", "labels", right, 100.0, "points"),
        "distilled_loss_over_labels": less("distilled", "labels", losses, 1.0, "nats"),
        "prune_accuracy_teacher": Value(100 * ground_.held_out(teacher, ground, seed)["accuracy"], "%"),
        "prune_units": Value(0.5, "x", note="hidden units that stay"),
    }
    return values


def ways(teacher: Decoder, ground: Ground, healing: Healing, seed: int) -> dict[str, Decoder]:
    """The small models of one seed."""

    def text() -> Any:
        return ground_.batches(ground, healing.steps, seed, "prune")

    def learn(model: Decoder, objective: Objective, read: Any, steps: int, rate: float, title: str) -> Decoder:
        return ground_.learn(model, objective, read, steps, rate, seed=seed, title=title)

    whole = ground_.towards(teacher)
    prune = Prune(width=0.5, importance="soft", steps=max(1, healing.masks * 4 // 5))
    masked = prune.apply(teacher).requires_grad_(True)
    for name, parameter in masked.named_parameters():
        if name.endswith("mask_updates"):  # a count, not a weight
            parameter.requires_grad_(False)
    learn(masked, whole, text(), healing.masks, healing.mask_rate, "masks")
    halved = prune.finish(masked)
    left = healing.steps - healing.masks
    objectives = {"distilled": whole, "top1": top_one(teacher, 0.9), "labels": NextToken.Config().build()}
    made = {}
    for name, objective in objectives.items():
        read = text()
        for _ in range(healing.masks):  # what the masks have read
            next(read)
        student: Decoder = ground_.copied(halved).requires_grad_(True)
        made[name] = learn(student, objective, read, left, healing.rate, f"healing, {name}")
    fresh = ground_.built(halved.config, seed, "scratch")
    made["scratch"] = learn(
        fresh, NextToken.Config().build(), text(), healing.steps, ground.rate, "the same from nothing"
    )
    return made
