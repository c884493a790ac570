"""The encoder: token ids in, a vector a token or a vector a sequence out. It reads a text whole and writes nothing.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.linear import Embedding
from orchard.nn.pooling import Pooling
from orchard.nn.stack import Stack


class Encoder(Configurable, nn.Module):
    """Embed tokens, places and types, normalise, run the stack; `vectors` pools what comes out."""

    @config
    class Config(BaseConfig):
        vocab: int = REQUIRED
        dim: int = REQUIRED
        context: int = REQUIRED
        """The longest sequence: there is one learned vector a place."""
        kinds: int = 2
        """Types of token (BERT: of the first text or the second); a text alone is all type 0."""
        embedding: Embedding.Config = field(default_factory=Embedding.Config)
        places: Embedding.Config = field(default_factory=Embedding.Config)
        types: Embedding.Config = field(default_factory=Embedding.Config)
        norm: LayerNorm.Config = field(default_factory=LayerNorm.Config)
        stack: Stack.Config = field(default_factory=Stack.Config)
        pooling: Pooling.Config = field(default_factory=Pooling.Config)

        def wire(self) -> None:
            for table, rows in ((self.embedding, self.vocab), (self.places, self.context), (self.types, self.kinds)):
                table.vocab, table.dim = rows, self.dim
            self.norm.dim = self.stack.dim = self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.embedding: Embedding = cfg.embedding.build()
        self.places: Embedding = cfg.places.build()
        self.types: Embedding = cfg.types.build()
        self.norm: LayerNorm = cfg.norm.build()
        self.stack: Stack = cfg.stack.build()
        self.pooling: Pooling = cfg.pooling.build()

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in: the dtype of the norm, which no format packs."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, ids: Tensor, context: Context | None = None, types: Tensor | None = None) -> Tensor:
        """Hidden vectors [B, T, dim] for ids [B, T]; without a context, for whole sequences without padding."""
        context = context or Context.whole(ids)
        places = context.positions.clamp(min=0)  # padding is -1, and takes any place: nothing reads it
        x = self.embedding(ids, self.dtype) + self.places(places, self.dtype)
        x = x + self.types(torch.zeros_like(ids) if types is None else types, self.dtype)
        out: Tensor = self.stack(self.norm(x), context)
        return out

    def vectors(self, ids: Tensor, valid: Tensor) -> Tensor:
        """One vector of length 1 a sequence: float32 [B, dim] for ids [B, T]; `valid` [B, T] marks padding False."""
        pooled: Tensor = self.pooling(self(ids, Context.whole(ids, valid)), valid)
        return pooled
