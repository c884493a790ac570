"""The models of `ifp` and how they learn: dense ones, one with a learned mask for all prompts, one with a mask for each.

All have the same attention and embeddings and begin from the same numbers where they have the same tensors; all read the same
rows for the same number of steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, Rotary
from orchard.nn.linear import Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives.base import Objective
from orchard.objectives.by_prompt import Bound, ByPrompt
from orchard.objectives.lm import NextToken
from orchard.studies._afm_ground import device, learn
from orchard.studies._ifp_tasks import DOMAINS, VOCAB, Exercises, exercises
from orchard.transforms.ifprune import IFPrune
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_model import Instructed

HELD_OUT = 128
"""Rows of each kind that losses are measured on."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    dim: int = 32
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    hidden: int = 64
    kept: int = 16
    reader: int = 32
    """Width of the predictor."""
    rows: int = 64
    steps: int = 1000
    rate: float = 1e-2
    temperature: float = 2.0
    cold: float = 0.5
    spread: float = 2.0
    """How far apart scores are at the beginning, in the unit that temperatures have."""
    compared: int = 12
    """Prompts of each kind whose choices are compared."""


def tree(size: Size, hidden: int) -> Decoder.Config:
    block = Block.Config(
        mixer=Attention.Config(
            heads=size.heads, kv_heads=size.heads, head_dim=size.head_dim, rotary=Rotary.Config(theta=30.0)
        ),
        mlp=GatedMLP.Config(hidden_dim=hidden),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=64, stack=stack, head=None).complete()


def trees(size: Size) -> dict[str, BaseConfig]:
    """The four models by name."""
    common: dict[str, Any] = {
        "keep": size.kept / size.hidden,
        "spread": size.spread,
        "temperature": size.temperature,
        "cold": size.cold,
        "steps": max(1, size.steps * 4 // 5),
    }
    whole = tree(size, size.hidden)
    return {
        "large": whole,
        "small": tree(size, size.kept),
        "static": IFPrune(predictor="fixed", **common).tree(whole),
        "ifp": IFPrune(predictor="reader", dim=size.reader, **common).tree(whole),
    }


def built(config: BaseConfig, seed: int) -> Any:
    """A fresh model. Linear maps begin as large as keeps activations even: with the usual small numbers a model this narrow
    spends most of its steps on a plateau."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights"))
        model: nn.Module = config.build()
        for name, part in sorted(model.named_modules()):
            if isinstance(part, Weight) and ".head." not in name:
                torch.manual_seed(fold(seed, "weights", name.removeprefix("decoder.")))
                part.assign(torch.empty(part.shape).normal_(std=part.shape[-1] ** -0.5))
    return model.to(device())


def objective_of(model: Any) -> Objective:
    made: Objective = (ByPrompt.Config() if isinstance(model, Instructed) else NextToken.Config()).build()
    return made


def trained(config: BaseConfig, size: Size, seed: int, title: str) -> Any:
    model = built(config, seed)
    read: Iterator[Batch] = (exercises(size.rows, seed, step).batch.to(device()) for step in itertools.count())
    return learn(model, objective_of(model), read, size.steps, size.rate, seed=seed, title=title, decay=0.01)


# Measuring ------------------------------------------------------------------------------------------------------------


def held_out(seed: int) -> dict[str, Exercises]:
    return {domain: exercises(HELD_OUT, seed, "held out", domain) for domain in DOMAINS}


@torch.no_grad()
def losses(model: Any, seed: int, tasks: dict[str, Choice] | None = None) -> dict[str, float]:
    """Nats a token of answers, by kind; `tasks`: with one choice for each kind instead of one for each prompt."""
    model.eval()
    found = {}
    for domain, read in held_out(seed).items():
        batch = read.batch.to(device())
        if tasks is None:
            loss = objective_of(model)(model, batch)
        else:
            units = {layer: part.to(device()) for layer, part in tasks[domain].units().items()}
            loss = NextToken.Config().build()(Bound(model, units), batch)
        found[domain] = float(loss.value) / float(loss.weight)
    return found


def mean(values: dict[str, float]) -> float:
    return statistics.fmean(values.values())


def choices(model: Instructed, size: Size, seed: int, name: str) -> dict[str, list[Choice]]:
    """What some prompts of each kind choose."""
    found = {}
    for domain in DOMAINS:
        read = exercises(size.compared, seed, name, domain)
        found[domain] = [model.choose(read.prompt(row)) for row in range(size.compared)]
    return found


def overlaps(found: dict[str, list[Choice]]) -> tuple[float, float]:
    """Mean Jaccard of two choices of one kind of exercise, and of two kinds."""
    within = [a.overlap(b) for each in found.values() for a, b in itertools.combinations(each, 2)]
    pairs = itertools.combinations(found.values(), 2)
    across = [a.overlap(b) for one, other in pairs for a in one for b in other]
    return statistics.fmean(within), statistics.fmean(across)


def usage_entropy(found: dict[str, list[Choice]]) -> float:
    """How evenly units are used over all prompts: 1 where all are equally often, the mean over layers."""
    used: Tensor = torch.stack([(one.weights > 0).float() for each in found.values() for one in each]).mean(0)
    share = used / used.sum(-1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-30).log()).sum(-1) / math.log(share.shape[-1])
    return float(entropy.mean())


def sequences(found: dict[str, list[Choice]]) -> Sequence[Choice]:
    return [one for each in found.values() for one in each]
