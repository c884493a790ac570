"""Tiny decoders for tests of quantisation: every family's shape, trained for a moment on rows with a simple rule."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from orchard.cache.store import Store
from orchard.core.batch import Batch
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.linear import Embedding, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

VOCAB, DIM, HIDDEN = 48, 64, 128


def block(kind: str = "llama", layer: int = 0) -> Block.Config:
    bias = kind == "qwen"
    mixer = Attention.Config(heads=4, kv_heads=2, head_dim=16)
    if bias:
        mixer = mixer.clone(**{name: Linear.Config(bias=True) for name in ("q", "k", "v")})
    mlp: Any = GatedMLP.Config(hidden_dim=HIDDEN)
    if kind == "moe":
        mlp = MoE.Config(hidden_dim=HIDDEN, experts=4)
    if kind == "shared" and layer == 1:
        mixer = mixer.clone(store=Store.Config(owner=0))
    if kind == "gemma":
        norms = {name: RMSNorm.Config(offset=1.0, cast_first=False) for name in _NORMS}
        return Block.Config(mixer=mixer, mlp=mlp.clone(activation="gelu_tanh"), **norms)
    if kind == "olmo":
        late = {"mixer_out_norm": RMSNorm.Config(), "mlp_out_norm": RMSNorm.Config()}
        return Block.Config(mixer=mixer, mlp=mlp, mixer_norm=None, mlp_norm=None, **late)
    return Block.Config(mixer=mixer, mlp=mlp)


_NORMS = ("mixer_norm", "mixer_out_norm", "mlp_norm", "mlp_out_norm")


def tree(kind: str = "llama", layers: int = 2, **more: Any) -> Any:
    blocks = [block(kind, layer) for layer in range(layers)]
    norm = RMSNorm.Config(offset=1.0) if kind == "gemma" else RMSNorm.Config()
    table = Embedding.Config(scale=DIM**0.5) if kind == "gemma" else Embedding.Config()
    fields = {"head": None if kind == "gemma" else Linear.Config(), "norm": norm, "embedding": table, **more}
    return Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=blocks), **fields)


def rows(count: int = 16, length: int = 24, seed: int = 0) -> Batch:
    """Each token is its two forerunners' sum, now and then something else."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCAB, (count, length))
    for place in range(2, length):
        follows = random.random(count) < 0.9
        ids[:, place] = np.where(follows, (ids[:, place - 1] + ids[:, place - 2]) % VOCAB, ids[:, place])
    targets = np.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    positions = np.broadcast_to(np.arange(length), ids.shape).copy()
    return Batch(ids=ids, targets=targets, positions=positions, documents=np.zeros_like(ids), plain=True)


@cache
def trained(kind: str = "llama", steps: int = 30, seed: int = 0) -> Decoder:
    """A model that has learnt something; tests must not change it."""
    torch.manual_seed(seed)
    model: Decoder = tree(kind).build()
    with torch.enable_grad():
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(steps):
            batch = rows(seed=100 + step).to("cpu")
            scores = model(batch.ids)
            loss = functional.cross_entropy(scores.flatten(0, 1), batch.targets.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval().requires_grad_(False)
