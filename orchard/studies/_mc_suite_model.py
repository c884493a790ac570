"""The mixtures that `mc-suite` prunes: small, trained from nothing with a weak balance loss, and measured by perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchard.core.batch import Batch
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.objectives import with_collected
from orchard.objectives.base import Objective
from orchard.objectives.lm import NextToken
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_text import VOCAB

BALANCE = "moe.balance"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    models: int = 3
    """Each trained from nothing, from a seed of its own."""
    dim: int = 64
    hidden: int = 64
    layers: int = 4
    experts: int = 8
    asked: int = 2
    rows: int = 16
    length: int = 64
    steps: int = 300
    rate: float = 6e-3
    balance: float = 1e-3
    """How much of the balance loss is learnt with."""
    heal: int = 5
    """Steps after the first round; twice as many after each later one."""
    heal_rate: float = 3e-3
    heal_balance: float = 5e-2
    rounds: int = 4
    looked: int = 8
    """Batches that criteria look at."""
    held_out: int = 4
    removal: int = 2
    """Batches that the removal of single experts is measured on."""
    chances: int = 4
    """Random choices for each model."""

    @property
    def ground(self) -> Ground:
        return Ground(rows=self.rows, length=self.length, steps=self.steps)


def tree(size: Size) -> Decoder.Config:
    """Llama-shaped, with a mixture in every layer and tied embeddings."""
    head_dim = 32
    heads = size.dim // head_dim
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=max(heads // 2, 1), head_dim=head_dim),
        mlp=MoE.Config(hidden_dim=size.hidden, experts=size.experts, router=TopK.Config(k=size.asked)),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=512, stack=stack, head=None).complete()


def objective(balance: float) -> Objective:
    """Next tokens, and some of the balance loss."""
    made: Objective = with_collected(NextToken.Config(), {BALANCE: balance}).build()
    return made


def trained(size: Size, seed: int) -> Decoder:
    model = ground_.built(tree(size), seed, "base")
    read = ground_.batches(size.ground, size.steps, seed, "base")
    learnt = ground_.learn(
        model, objective(size.balance), read, size.steps, size.rate, seed=seed, title="training a mixture"
    )
    return learnt.requires_grad_(False)


def healed(model: Decoder, size: Size, number: int, seed: int, balance: float) -> Decoder:
    """After round `number` (from 0): next tokens of text that nobody has read, the optimizer begun anew, all weights."""
    steps = size.heal * 2**number
    read = ground_.batches(size.ground, steps, seed, f"round {number}")
    learnt = ground_.learn(
        model.requires_grad_(True), objective(balance), read, steps, size.heal_rate, seed=seed, title="healing"
    )
    return learnt.requires_grad_(False)


def texts(size: Size, count: int, seed: int, name: str) -> list[Batch]:
    return list(ground_.batches(size.ground, count, seed, name))


def perplexity(model: Decoder, held: Sequence[Batch]) -> float:
    return math.exp(ground_.loss_on(model, held))
