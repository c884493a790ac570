"""The models of `stochastic-kv-routing`: how they learn, and what they lose when few layers keep keys and values.

All read the same text in the same order, for as many steps; the fine-tuned one begins from the trained one and reads other text.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import torch

from orchard.core.context import Context
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.objectives.lm import NextToken
from orchard.studies import _afm_ground as grounds
from orchard.studies._afm_ground import Ground
from orchard.transforms.retain import Retain
from orchard.transforms.route_kv import RouteKV
from orchard.transforms.share_kv import kv_bytes

RETAINED = {"100": 1, "50": 2, "25": 4}
"""Percent of the layers that are kept, and of how many layers one is."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is. `layers` is a multiple of four."""

    ground: Ground
    p_borrow: float = 0.5
    p_tuned: float = 0.6
    tuned: float = 0.2
    """Steps of fine-tuning, as a share of those of training."""
    tuned_rate: float = 0.5
    """The highest rate of fine-tuning, as a share of that of training."""
    sets: int = 8
    """Sets of layers by chance that decoding is compared with."""
    smollm2: int = 0
    """Tokens for which SmolLM2 is routed; 0: it is not."""


def models(size: Size, seed: int) -> dict[str, Decoder]:
    """By name: `base`, `rcla` (routed from the first step on), `cla` (one fixed pattern, every second layer), `shallow` (half of
    the layers), `tuned` (the base, routed for some steps more) and `longer` (the base for as many steps more, without)."""
    ground = size.ground
    tree = grounds.tree(ground)
    half = grounds.tree(replace(ground, layers=ground.layers // 2))
    found = {
        "base": grounds.base(ground, seed, "the base", tree),
        "rcla": grounds.base(ground, seed, "with routing", RouteKV(size.p_borrow).tree(tree)),
        "cla": grounds.base(ground, seed, "a fixed pattern", Retain(every=2)(tree)),
        "shallow": grounds.base(ground, seed, "half of the layers", half),
    }
    found["tuned"] = _tuned(RouteKV(size.p_tuned).apply(found["base"]), size, seed, "routing a trained model")
    found["longer"] = _tuned(grounds.copied(found["base"]), size, seed, "the base, longer")
    for name in ("rcla", "tuned"):
        found[name] = RouteKV().finish(found[name]).eval()
    return found


def _tuned(model: Decoder, size: Size, seed: int, title: str) -> Decoder:
    ground, steps = size.ground, max(1, round(size.tuned * size.ground.steps))
    read = grounds.batches(ground, steps, seed, "fine-tuning")
    rate = size.tuned_rate * ground.rate
    return grounds.learn(model, NextToken.Config().build(), read, steps, rate, seed=seed, title=title)


def kept(layers: int, every: int) -> tuple[int, ...]:
    return tuple(range(0, layers, every))


def losses(found: dict[str, Decoder], size: Size, seed: int) -> dict[str, dict[str, float]]:
    """Nats a character, by model and percent of layers that are kept; a fixed pattern is kept as it is, or halved."""
    table: dict[str, dict[str, float]] = {}
    for name, model in found.items():
        layers = len(model.config.stack.layers)
        rates = {"cla": ("50", "25"), "shallow": ("100",), "longer": ("100",)}.get(name, tuple(RETAINED))
        table[name] = {
            rate: grounds.loss(Retain(layers=kept(layers, RETAINED[rate])).apply(model).eval(), size.ground, seed)
            for rate in rates
        }
    return table


def other_halves(model: Decoder, size: Size, seed: int, most: int = 6) -> dict[str, float]:
    """The same for other sets of half of the layers than every second one."""
    layers = len(model.config.stack.layers)
    sets = [(0, *rest) for rest in itertools.combinations(range(1, layers), layers // 2 - 1)]
    chosen = random.Random(fold(seed, "halves")).sample(sets, min(most, len(sets)))
    return {
        ", ".join(map(str, one)): grounds.loss(Retain(layers=one).apply(model).eval(), size.ground, seed)
        for one in sorted(chosen)
    }


@torch.no_grad()
def exactness(model: Decoder, size: Size, seed: int) -> tuple[float, float]:
    """Over sets of layers by chance: how far the bytes of stores are from |S| / L of all, and token by token from all at once, as
    a share of the largest score."""
    model = grounds.copied(model).cpu().float()
    layers, length = len(model.config.stack.layers), min(24, size.ground.length)
    chance, bytes_off, apart = random.Random(fold(seed, "sets")), 0.0, 0.0
    ids = next(grounds.batches(size.ground, 1, seed, "decoded", rows=2)).ids[:, :length].cpu()
    whole = model.cache(batch=2, length=length).nbytes
    for _ in range(size.sets):
        one = (0, *(layer for layer in range(1, layers) if chance.random() < 0.5))
        made = Retain(layers=one).apply(model).eval()
        cache = made.cache(batch=2, length=length)
        share = len(one) / layers
        counted = kv_bytes(made.config) / kv_bytes(model.config)
        bytes_off = max(bytes_off, abs(cache.nbytes / whole - share), abs(counted - share))
        steps = [
            made(ids[:, at : at + 1], Context(torch.full((2, 1), at), cache=cache, upto=at + 1)) for at in range(length)
        ]
        wanted = made(ids)
        apart = max(apart, float((torch.cat(steps, 1) - wanted).abs().max() / wanted.abs().max()))
    return bytes_off, apart
