"""Tiny decoders with units to choose from, for the tests of sub-networks."""

from __future__ import annotations

import torch

from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.transforms.ifprune import IFPrune
from orchard.transforms.ifprune_model import Instructed

VOCAB, DIM, HIDDEN, LAYERS = 23, 16, 32, 3


def tree(hidden: int = HIDDEN, dim: int = DIM) -> Decoder.Config:
    block = Block.Config(
        mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=GatedMLP.Config(hidden_dim=hidden)
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(LAYERS)])
    return Decoder.Config(vocab=VOCAB, dim=dim, context=64, stack=stack, head=None).complete()


def decoder(seed: int = 0, hidden: int = HIDDEN, dim: int = DIM) -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: Decoder = tree(hidden, dim).build()
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(std=0.4)
    return made.eval()


def instructed(seed: int = 0, **settings: object) -> Instructed:
    """With weights that are large enough for choices to matter."""
    usual: dict[str, object] = {"keep": (0.5, 0.25), "groups": 6, "shared": 0.25, "predictor": "first-layers", "first": 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = IFPrune(**{**usual, **settings}).apply(decoder(seed))  # type: ignore[arg-type]
    return made.eval()
