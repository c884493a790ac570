"""The model of `epicache`: a small transformer that learns to look facts up, in chats that grow as it gets better."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from orchard.core.batch import IGNORED, Batch
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, Rotary
from orchard.nn.linear import Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.studies._afm_ground import device
from orchard.studies._epicache_chats import VOCAB, lesson

LESSONS = ((4, 8, 64), (8, 8, 48), (16, 16, 24), (32, 32, 12), (64, 64, 6), (128, 64, 4))
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
    steps: int = 1500
    rate: float = 3e-3
    facts: int = 128
    """Of a chat that is asked about: 4 tokens each."""
    chats: int = 6
    oracle: int = 8
    """Questions of a chat that have a cache of their own."""
    compression: int = 8
    sinks: int = 1
    medoids: int = 8
    alphas: tuple[float, ...] = (1.0, 2.0, 4.0)


def tree(size: Size) -> Decoder.Config:
    block = Block.Config(
        mixer=Attention.Config(
            heads=size.heads,
            kv_heads=size.heads,
            head_dim=size.head_dim,
            rotary=Rotary.Config(theta=100.0, fraction=0.5),
        ),
        mlp=GatedMLP.Config(hidden_dim=2 * size.dim),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=1024, stack=stack, head=None)


def built(size: Size, seed: int) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights"))
        model: Decoder = tree(size).build()
        for part in model.modules():
            if isinstance(part, Weight):
                part.assign(torch.empty(part.shape).normal_(std=part.shape[-1] ** -0.5))
    return model.to(device())


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
