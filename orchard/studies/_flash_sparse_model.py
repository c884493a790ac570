"""The study's model: a small decoder over characters, trained with SiLU, relufied, and trained on until most units are silent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives.collected import with_collected
from orchard.objectives.lm import NextToken
from orchard.studies._afm_ground import Ground, batches, built, learn, loss_on
from orchard.studies._afm_text import VOCAB
from orchard.transforms.relufy import ACTIVITY, Relufy

HEAD = 32


@dataclass(frozen=True, kw_only=True)
class Shape:
    dim: int = 128
    units: int = 512
    layers: int = 3
    first: int = 100
    """Updates with SiLU."""
    second: int = 160
    """Updates after relufication."""
    press: float = 0.3
    """How much of the activity (a share of all units) is added to the loss."""
    rate: float = 4e-3

    @property
    def ground(self) -> Ground:
        return Ground(dim=self.dim, layers=self.layers, rows=8, steps=self.first, rate=self.rate, held_out=128)


@dataclass(frozen=True)
class Trained:
    model: Decoder
    """ReLU, mostly silent."""
    before: float
    """The loss before relufication."""
    loss: float


def tree(shape: Shape) -> Decoder.Config:
    heads = shape.dim // HEAD
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=max(1, heads // 2), head_dim=HEAD),
        mlp=GatedMLP.Config(hidden_dim=shape.units),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(shape.layers)])
    return Decoder.Config(vocab=VOCAB, dim=shape.dim, context=512, stack=stack, head=None).complete()


def trained(shape: Shape, seed: int) -> Trained:
    ground = shape.ground
    model = built(tree(shape), seed, "flash")
    plain = NextToken.Config()
    read = batches(ground, shape.first, seed, "silu")
    learn(model, plain.build(), read, shape.first, shape.rate, seed=seed, title="training with SiLU", floor=0.3)
    before = held_out(model, shape, seed)
    relu = Relufy(watched=True)
    model = relu.apply(model).train()
    pressed = with_collected(plain, {ACTIVITY: shape.press}).build()
    read = batches(ground, shape.second, seed, "relu")
    learn(model, pressed, read, shape.second, shape.rate, seed=seed, title="training with ReLU")
    model = relu.finish(model).eval().requires_grad_(False).cpu()
    return Trained(model, before, held_out(model, shape, seed))


def text(shape: Shape, count: int, seed: int, name: str) -> list[Batch]:
    """Batches where the trained model is: neurons in files are read by a processor."""
    return [batch.to(torch.device("cpu")) for batch in batches(shape.ground, count, seed, name)]


def held_out(model: Decoder, shape: Shape, seed: int) -> float:
    """Nats a character on text that nobody learns from."""
    count = shape.ground.held_out // shape.ground.rows
    return loss_on(model, (batch.to(model.device) for batch in batches(shape.ground, count, seed, "held out")))


def prompts(shape: Shape, count: int, length: int, seed: int) -> Tensor:
    """Beginnings of texts, [count, length]."""
    rows = torch.cat([batch.ids for batch in text(shape, -(-count // 8), seed, "prompts")])
    return rows[:count, :length]
