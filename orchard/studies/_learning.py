"""A whole training run without files: sequences to count in, a decoder of any size, every part of a run's state in use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig, config
from orchard.core.seeds import fold
from orchard.data.source import Stage, State
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.train.ema import EMA
from orchard.train.optim import AdamW
from orchard.train.trainer import Saving, Trainer

NEVER = 10**9
"""Steps between two saves of a run that does not save by itself."""


class Counting(Stage[Batch]):
    """Rows that count up from somewhere in steps of some size: easily learnt, and without an end."""

    @config
    class Config(BaseConfig):
        vocab: int = 32
        rows: int = 4
        length: int = 16
        seed: int = 0

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        super().__init__(seed=cfg.seed)
        self.cfg = cfg
        self.given = 0

    def __next__(self) -> Batch:
        cfg = self.cfg
        dice = np.random.default_rng(fold(cfg.seed, "rows", self.given))
        first, stride = dice.integers(0, cfg.vocab, (2, cfg.rows, 1))
        tokens = (first + (1 + stride % 3) * np.arange(cfg.length + 1)) % cfg.vocab
        places = np.broadcast_to(np.arange(cfg.length), (cfg.rows, cfg.length)).copy()
        self.given += 1
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), places, np.zeros_like(places), plain=True)

    def _own(self) -> State:
        return {"given": self.given}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.given = int(state["given"])

    def _reset(self, epoch: int) -> None:
        self.given = 0


def decoder(dim: int, layers: int, vocab: int, context: int) -> Decoder.Config:
    """Llama-shaped, with heads of 8 to 64 places and tied embeddings."""
    head_dim = min(max(dim // 4, 8), 64)
    heads = max(dim // head_dim, 1)
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=max(heads // 2, 1), head_dim=head_dim),
        mlp=GatedMLP.Config(hidden_dim=3 * dim),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(layers)])
    return Decoder.Config(vocab=vocab, dim=dim, context=context, stack=stack, head=None)


def trainer(folder: Path, model: Decoder.Config, source: Counting.Config, **settings: Any) -> Trainer:
    """With AdamW and averages: four numbers are kept for each parameter."""
    given: dict[str, Any] = {"optim": AdamW.Config(lr=3e-3), "ema": EMA.Config(), "save": Saving.Config(every=NEVER)}
    cfg = Trainer.Config(model=model, source=source, **given | settings)
    made: Trainer = cfg.build(folder=folder)
    return made
