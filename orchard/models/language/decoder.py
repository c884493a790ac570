"""The decoder: token ids in, scores for the next token out. Every family is a config of this one class.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from orchard.cache.store import Cache, Store
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.formats.base import NotLowered
from orchard.nn.linear import Embedding, Linear
from orchard.nn.lowering import floats, native_of, obstacle, part_of
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Stack
from orchard.ops.plan.builder import Builder


class Decoder(Configurable, nn.Module):
    """Embed, run the stack, normalise, score."""

    @config
    class Config(BaseConfig):
        vocab: int = REQUIRED
        dim: int = REQUIRED
        context: int = REQUIRED
        """The longest sequence the model was made for."""
        embedding: Embedding.Config = field(default_factory=Embedding.Config)
        stack: Stack.Config = field(default_factory=Stack.Config)
        norm: RMSNorm.Config = field(default_factory=RMSNorm.Config)
        head: Linear.Config | None = field(default_factory=Linear.Config)
        """None: the embedding is used the other way round (tied)."""
        softcap: float | None = None
        """Bound on the magnitude of scores (Gemma 2)."""

        def wire(self) -> None:
            self.embedding.vocab, self.embedding.dim = self.vocab, self.dim
            self.stack.dim = self.norm.dim = self.dim
            if self.head is not None:
                self.head.in_dim, self.head.out_dim = self.dim, self.vocab

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.embedding: Embedding = cfg.embedding.build()
        self.stack: Stack = cfg.stack.build()
        self.norm: RMSNorm = cfg.norm.build()
        self.head: Linear | None = cfg.head.build() if cfg.head is not None else None

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in: the dtype of the last norm, which no format packs."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        """Scores [B, T, V] for ids [B, T]; without a context, for whole sequences that start at 0."""
        return self.scores(self.hidden(ids, context or Context.whole(ids)))

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """What the head reads: [B, T, dim]."""
        x = self.embedding(ids, self.dtype)
        out: Tensor = self.norm(self.stack(x, context))
        return out

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] for hidden vectors, in the model's dtype."""
        logits = self.embedding.scores(hidden) if self.head is None else self.head(hidden)
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def lower(self, builder: Builder) -> None:
        """Say the whole model. The table and the head have to be native: between them any module may run in torch."""
        if (reason := obstacle(self)) is not None:
            raise NotLowered(reason)
        table = native_of(self.embedding)
        x = builder.embed(table, self.embedding.config.scale or 1.0, path="embedding")
        x = part_of(builder, self.stack, x, "stack")
        x = part_of(builder, self.norm, x, "norm")
        if self.head is None:
            builder.head(x, table, softcap=self.config.softcap, path="embedding")
        else:
            head, bias = native_of(self.head), floats(self.head.bias)
            builder.head(x, head, bias, self.config.softcap, path="head")

    def stores(self) -> list[Store.Config]:
        """Each layer's store config, in order; of tracks, each track's."""
        return [mixer.store for layer in self.config.stack.layers for mixer in layer.mixers()]

    def cache(self, *, batch: int, length: int) -> Cache:
        """Empty stores for `batch` sequences of up to `length` tokens, without those that other processes keep."""
        away = self.stack.elsewhere()
        stores = [None if number in away else store for number, store in enumerate(self.stores())]
        return Cache(stores, batch=batch, length=length, dtype=self.dtype, device=self.device)
