"""The model of `epicache`: a small transformer that learns to look facts up, in chats that grow as it gets better.

Two things are given to it at the beginning, because finding them takes a model this small most of its steps: two heads of the
first layer look one and two tokens back, and in later layers keys are read from a token as queries are, so that like looks at
like. Everything is learnt from there on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from orchard.core.batch import IGNORED, Batch
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, Rotary
from orchard.nn.linear import Embedding, Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.studies._afm_ground import device
from orchard.studies._epicache_chats import VOCAB, lesson

LESSONS = ((4, 12, 10), (8, 16, 8), (16, 24, 5), (32, 32, 3), (64, 64, 2), (128, 64, 1))
"""Facts of a chat, questions after it, rows of a batch: from short to long."""
GOOD = 0.85
"""Questions answered, of the last ones, that lead to the next lesson."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    dim: int = 64
    layers: int = 4
    heads: int = 2
    head_dim: int = 32
    steps: int = 500
    rate: float = 4e-3
    facts: int = 128
    """Of a chat that is asked about: 4 tokens each."""
    chats: int = 6
    oracle: int = 8
    """Questions of a chat that have a cache of their own."""
    compression: int = 8
    sinks: int = 1
    medoids: int = 8
    alphas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)


def tree(size: Size) -> Decoder.Config:
    block = Block.Config(
        mixer=Attention.Config(
            heads=size.heads,
            kv_heads=size.heads,
            head_dim=size.head_dim,
            rotary=Rotary.Config(theta=100.0, fraction=0.5),
        ),
        mlp=GatedMLP.Config(hidden_dim=size.dim),
    )
    block = block.set("mixer.q.bias", True).set("mixer.k.bias", True)
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    table = Embedding.Config(scale=size.dim**0.5)
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=1024, embedding=table, stack=stack, head=None)


def built(size: Size, seed: int) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights"))
        model: Decoder = tree(size).build()
        for part in model.modules():
            if isinstance(part, Weight):
                part.assign(torch.empty(part.shape).normal_(std=part.shape[-1] ** -0.5))
    mixers: list[Any] = [layer.mixer for layer in model.stack.layers]
    first, *later = mixers
    with torch.no_grad():
        for head in range(min(2, size.heads)):
            look_back(first, head, head + 1)
        for mixer in later:
            mixer.k.weight.copy_(mixer.q.weight)
    return model.to(device())


def look_back(mixer: Any, head: int, tokens: int, strength: float = 5.0, pairs: int = 4) -> None:
    """Let a head begin by looking so many tokens back: a query and a key that are the same for all tokens, apart by that turn."""
    turns = mixer.rotary.frequencies(torch.device("cpu"))
    start = head * mixer.config.head_dim
    for place, angle in enumerate((turns[:pairs] * tokens).tolist()):
        mixer.q.bias[start + place] = strength
        mixer.k.bias[start + place] = strength * math.cos(angle)
        mixer.k.bias[start + place + len(turns)] = strength * math.sin(angle)


def trained(size: Size, seed: int) -> Decoder:
    """AdamW with a rate that falls; the next lesson begins when most questions are answered."""
    model = built(size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.98), weight_decay=0.01)
    place, good = 0, 0.0
    longest = max(number for number, (facts, *_) in enumerate(LESSONS) if facts <= size.facts)
    with progress("learning to look up", total=size.steps, unit="steps") as advance:
        for step in range(size.steps):
            facts, asked, rows = LESSONS[place]
            batch = lesson(rows, facts, asked, seed, step).to(device())
            for group in optimizer.param_groups:
                group["lr"] = size.rate * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / size.steps)
            right = _learn(model, optimizer, batch)
            good = 0.9 * good + 0.1 * right
            if good > GOOD and place < longest:
                place, good = place + 1, 0.5
            advance(note=f"{facts} facts, {good:.2f} right")
    return model.eval()


def _learn(model: Decoder, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    asked = batch.targets != IGNORED
    scores, want = model(batch.ids)[asked], batch.targets[asked]
    loss = functional.cross_entropy(scores, want)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((scores.argmax(-1) == want).float().mean())
