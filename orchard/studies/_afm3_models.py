"""The models of `afm-3` and how they learn.

All begin from the same numbers and read the same rows for as many steps: one that chooses, a dense one of all units, a dense
one of as many as a choice uses, and a dense one that is cut on the way to a fixed part by how active its units are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, Batch
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, Rotary
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives.base import Objective
from orchard.objectives.by_prompt import Bound, ByPrompt
from orchard.objectives.lm import NextToken
from orchard.studies._afm3_texts import DOMAINS, VOCAB, rows
from orchard.studies._afm_ground import device, learn
from orchard.studies._ifp_models import built
from orchard.transforms.ifprune import IFPrune
from orchard.transforms.ifprune_model import Instructed
from orchard.transforms.prune import Prune

BUDGETS = (1 / 4, 1 / 8, 1 / 2)
"""Shares of the groups; the first is the usual one."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    dim: int = 64
    layers: int = 2
    hidden: int = 512
    first: int = 128
    """Hidden units of the first layer, which reads prompts for the others and chooses nothing."""
    shared: float = 0.25
    groups: int = 24
    rows: int = 8
    length: int = 96
    span: int = 32
    """Tokens that one choice is made by, and that it serves in training."""
    opening: int = 8
    """Tokens that the first choice of a row is made by in training."""
    base: int = 200
    """Steps of the dense model that is cut to a fixed part, and of that part afterwards; all others learn for as many
    together."""
    steps: int = 300
    rate: float = 5e-3
    tune: float = 4e-3
    temperature: float = 2.0
    cold: float = 0.5
    spread: float = 2.0
    switched: float = 0.3
    """The share of rows that change to another kind of text half-way."""
    held_out: int = 48
    """Rows of each kind that losses are measured on."""
    prompt: int = 64
    new: int = 128

    @property
    def active(self) -> int:
        """Hidden units that the usual budget uses."""
        size = (self.hidden - round(self.shared * self.hidden)) // self.groups
        return self.hidden - size * self.groups + size * round(BUDGETS[0] * self.groups)


def tree(size: Size, hidden: int) -> Decoder.Config:
    heads = size.dim // 16
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=heads, head_dim=16, rotary=Rotary.Config(theta=300.0)),
        mlp=GatedMLP.Config(hidden_dim=hidden),
    )
    layers = [block.clone() for _ in range(size.layers)]
    layers[0].mlp = GatedMLP.Config(hidden_dim=size.first)
    stack = Stack.Config(layers=layers)
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=512, stack=stack, head=None).complete()


def text(size: Size, seed: int, start: int = 0) -> Iterator[Batch]:
    for step in itertools.count(start):
        switch = size.span * (1 + step % (size.length // size.span - 1))
        yield rows(size.rows, size.length, seed, step, switch=switch, share=size.switched).to(device())


def ways(size: Size, seed: int) -> dict[str, Any]:
    """The four models."""

    def go(model: Any, objective: Objective, start: int, steps: int, rate: float, title: str) -> Any:
        read = text(size, seed, start)
        return learn(model, objective, read, steps, rate, seed=seed, title=title, decay=0.01)

    plain: Objective = NextToken.Config().build()
    spans: Objective = ByPrompt.Config(span=size.span, first=size.opening).build()
    whole = size.base + size.steps
    fresh = built(tree(size, size.hidden), seed)
    base = go(copy.deepcopy(fresh), plain, 0, size.base, size.rate, "a dense model, to be cut")
    return {
        "sparse": go(choosing(fresh, size, seed), spans, 0, whole, size.rate, "the model that chooses"),
        "large": go(copy.deepcopy(fresh), plain, 0, whole, size.rate, "a dense model of all units"),
        "small": go(built(tree(size, size.active), seed), plain, 0, whole, size.rate, "a dense model of those in use"),
        "static": go(pruned(base, size, seed), plain, size.base, size.steps, size.tune, "a fixed part of the units"),
    }


def choosing(base: Decoder, size: Size, seed: int) -> Instructed:
    transform = IFPrune(
        keep=BUDGETS,
        groups=size.groups,
        shared=size.shared,
        predictor="first-layers",
        first=1,
        head=size.dim,
        window=size.span,
        spread=size.spread,
        temperature=size.temperature,
        cold=size.cold,
        steps=max(1, (size.base + size.steps) * 4 // 5),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = transform.apply(base)
    for parameter in made.decoder.parameters():
        parameter.requires_grad_(True)
    return made


def pruned(base: Decoder, size: Size, seed: int) -> Decoder:
    """The same model cut once to the usual budget's units, those that are most active on text of all kinds."""
    looked = [rows(size.rows, size.length, seed, f"looked at {place}").to(device()) for place in range(4)]
    paths = {f"stack.layers.{layer}.mlp": size.active for layer in range(1, size.layers)}
    made: Decoder = Prune(width=1.0, widths=paths, importance="activation", multiple=1).apply(base, looked)
    return made.requires_grad_(True)


# Measuring ------------------------------------------------------------------------------------------------------------


def answers(size: Size, seed: int, domain: str) -> Batch:
    """Text of one kind, of which what comes after the prompt counts."""
    batch = rows(size.held_out, 2 * size.prompt, seed, "held out", domain)
    targets = batch.targets.clone()
    targets[:, : size.prompt - 1] = IGNORED
    return replace(batch, targets=targets, full=False).to(device())


@torch.no_grad()
def losses(model: Any, size: Size, seed: int, budget: int | None = None) -> dict[str, float]:
    """Nats a character after a prompt, by kind of text. Who chooses does so by the prompt, once."""
    model.eval()
    sparse = isinstance(model, Instructed)
    objective: Objective = (ByPrompt.Config(budget=budget) if sparse else NextToken.Config()).build()
    found = {}
    for domain in DOMAINS:
        loss = objective(model, answers(size, seed, domain))
        found[domain] = float(loss.value) / float(loss.weight)
    return found


@torch.no_grad()
def after_a_switch(model: Instructed, size: Size, seed: int, every: int | None) -> float:
    """Nats a character of text that has become another kind half a span after the prompt. `every`: the choice is made anew
    after so many characters; keys and values of what came before stay as they were made."""
    switch, length = size.prompt + size.span // 2, size.prompt + 4 * size.span
    batch = rows(4 * size.held_out, length, seed, "switched", switch=switch, share=1.0).to(device())
    targets = batch.targets.clone()
    targets[:, : switch - 1] = IGNORED
    turns = [size.prompt] if every is None else list(range(size.prompt, length, every))
    at = torch.tensor([turn - 1 for turn in turns], device=device()).expand(len(batch.ids), -1)
    places = torch.arange(length, device=device())
    spans = sum((places >= turn).long() for turn in turns[1:]) if len(turns) > 1 else torch.zeros_like(places)
    assert isinstance(spans, Tensor)
    units = model.eval().units(batch.ids, at, spans.expand(len(batch.ids), -1))
    loss = NextToken.Config().build()(Bound(model, units), replace(batch, targets=targets, full=False))
    return float(loss.value) / float(loss.weight)
