"""The study's decoder: a small one that learns sums, whose maps then keep their own channels of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.progress import track
from orchard.core.seeds import generator
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.transforms.upscale_inputs import Copies, PruneInputs, copies, masked_inputs

PLUS, EQUALS, WORDS = 10, 11, 12
SUMS = 6
"""In one row."""


@dataclass(frozen=True)
class Scale:
    dim: int = 96
    layers: int = 3
    steps: int = 300
    batch: int = 48
    rate: float = 3e-3


@dataclass(frozen=True)
class Pruned:
    """How a pruned decoder did: its loss, what it copies, how far from the masked one its scores are (of the largest)."""

    loss: float
    copies: Copies
    difference: float


def rows(count: int, seed: int, name: str) -> Tensor:
    """Rows of sums, [count, tokens]: two digits plus two digits are three, the lowest first."""
    chance = generator(seed, "sums", name)
    numbers = torch.randint(0, 100, (count, SUMS, 2), generator=chance)
    total = numbers.sum(-1)
    sign = torch.full_like(total, PLUS)
    parts = [numbers[..., 0] % 10, numbers[..., 0] // 10, sign, numbers[..., 1] % 10, numbers[..., 1] // 10]
    parts += [torch.full_like(total, EQUALS), total % 10, total // 10 % 10, total // 100]
    return torch.stack(parts, -1).flatten(1)


def loss_of(model: Decoder, ids: Tensor) -> Tensor:
    """Of the three digits of each sum, which are all that can be known."""
    scores = model(ids[:, :-1]).float()
    known = torch.arange(ids.shape[1] - 1) % 9 >= 5
    return functional.cross_entropy(scores[:, known].flatten(0, 1), ids[:, 1:][:, known].flatten())


def trained(scale: Scale, seed: int) -> Decoder:
    heads = Attention.Config(heads=4, kv_heads=2, head_dim=scale.dim // 4)
    layers = [
        Block.Config(mixer=heads.clone(), mlp=GatedMLP.Config(hidden_dim=scale.dim * 2)) for _ in range(scale.layers)
    ]
    tree = Decoder.Config(vocab=WORDS, dim=scale.dim, context=9 * SUMS, stack=Stack.Config(layers=layers))
    with torch.random.fork_rng():
        torch.manual_seed(generator(seed, "decoder").initial_seed())
        model: Decoder = tree.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, scale.rate, total_steps=scale.steps, pct_start=0.1)
    for step in track(range(scale.steps), "training a decoder"):
        loss = loss_of(model, rows(scale.batch, seed, f"step {step}"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def pruned(model: Decoder, how: PruneInputs, ids: Tensor) -> Pruned:
    small = how.apply(model)
    want, got = masked_inputs(model, how.choose(model))(ids), small(ids)
    return Pruned(float(loss_of(small, ids)), copies(small.config), float((want - got).abs().max() / want.abs().max()))
