"""Tiny ReLU models for the tests of neurons that live in files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from orchard.core.batch import Batch
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack

VOCAB, DIM, UNITS = 40, 16, 96


def tree(mlp: Any, layers: int = 2) -> Any:
    mixer = Attention.Config(heads=2, kv_heads=1, head_dim=8)
    blocks = [Block.Config(mixer=mixer.clone(), mlp=mlp.clone()) for _ in range(layers)]
    return Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=blocks), head=None).complete()


def gated(activation: str = "relu", bias: bool = False) -> Any:
    maps = {name: Linear.Config(bias=bias) for name in ("gate", "up", "down")}
    return GatedMLP.Config(hidden_dim=UNITS, activation=activation, **maps)


def ungated(activation: str = "relu", bias: bool = True) -> Any:
    maps = {name: Linear.Config(bias=bias) for name in ("up", "down")}
    return FeedForward.Config(hidden_dim=UNITS, activation=activation, **maps)


def built(mlp: Any, seed: int = 0) -> Decoder:
    """Weights large enough to matter, biases that make most units silent."""
    chance = torch.Generator().manual_seed(seed)
    model: Decoder = tree(mlp).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=chance) - 1.5)
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.25)
    return model.eval().requires_grad_(False)


def texts(count: int = 3, rows: int = 4, length: int = 32, seed: int = 1) -> list[Batch]:
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = chance.integers(0, VOCAB, (rows, length + 1))
        places = np.broadcast_to(np.arange(length), (rows, length)).copy()
        parts = (ids[:, :-1].copy(), ids[:, 1:].copy(), places, np.zeros_like(places))
        made.append(Batch(*parts, plain=True, full=True).to(torch.device("cpu")))
    return made
