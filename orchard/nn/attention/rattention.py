"""RATTENTION (arXiv 2506.15545): attention inside a window, and linear attention over everything behind it.

What lies in the window is seen by softmax attention with rotary positions, as `Attention` does it. All that lies behind is seen
as one sum a head (`orchard.ops.linear_attention`), from the same queries, keys and values before they are rotated or scaled. Both
are normalised head by head, with gains of their own, and added; there are no other new parameters. A layer so keeps its window
and one matrix a head, for any length, and a short window loses less than it does alone.

`window` counts tokens as `Attention` does, a query's own included: it is the paper's w + 1. A token that is `window` back is the
first that is not in the window, and the last that is in the sum.

Keys and values live in a store with a residue (`orchard.cache.residue`): with the policy `Window` it takes the same bytes for any
length; with `KeepAll` everything is kept, and a sequence can go back. Documents of one row do not see each other, and padding
counts for nothing. What differs from the authors' code: no state is learnt to begin with, and no scales of queries and keys, both
of which are off there by default; and the native engine runs such a layer in torch.

Shapes: B sequences, T tokens, Hq query heads, H key/value heads, S slots, D head width.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from orchard.cache.policies import Window
from orchard.cache.residue import Residue
from orchard.core.config import config
from orchard.core.context import Context, KVView
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.norm import HeadNorm
from orchard.ops.linear_attention import beyond, chunked, naive, read


class RAttention(Attention):
    """A mixer: a window, and the sum of what lies behind it."""

    @config
    class Config(Attention.Config):
        near_norm: HeadNorm.Config = field(default_factory=HeadNorm.Config)
        """Of what the window gives."""
        far_norm: HeadNorm.Config = field(default_factory=HeadNorm.Config)
        """Of what the sum gives."""
        chunk: int | None = 64
        """Tokens in one piece of a long input; None: every pair of tokens, as slow as full attention."""

        def wire(self) -> None:
            if self.window is None:
                raise ConfigError("RATTENTION without a window", hint="use window ≥ 1, or Attention to see everything")
            if self.chunk is not None and self.chunk < 1:
                raise ConfigError(f"pieces of {self.chunk} tokens", hint="use chunk ≥ 1, or None for all pairs")
            super().wire()
            for norm in (self.near_norm, self.far_norm):
                norm.heads, norm.dim = self.heads, self.heads * self.head_dim
            self.store.residue = Residue.Config()
            kept = self.store.policy
            if isinstance(kept, Window.Config) and kept.window < self.window:
                raise UnsupportedPair(
                    f"a store of {kept.window} tokens in a layer that sees {self.window}: some would be seen nowhere",
                    hint=f"use the policy Window with window={self.window} or more",
                )

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        assert cfg.window is not None  # as `wire` saw to
        self.window, self.chunk = cfg.window, cfg.chunk
        self.near_norm: HeadNorm = cfg.near_norm.build()
        self.far_norm: HeadNorm = cfg.far_norm.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self._heads(self.q(x), self.q_norm, self.config.heads)
        view = self._view(x, context)
        turned = q if self.rotary is None else self.rotary(q, context.places, context)
        near = self.near_norm(self._look(turned, view, context))
        y = near + self.far_norm(self._far(q, view, context))
        out: Tensor = self.o(y.to(x.dtype).transpose(1, 2).flatten(2))
        return out

    def _far(self, q: Tensor, view: KVView, context: Context) -> Tensor:
        """What queries get of all that lies behind their windows."""
        k, window, chunk = view.raw, self.window, self.chunk
        if k is None:
            raise UnsupportedPair("this store does not show keys before rotation", hint="use a store with a residue")
        if q.shape[2] == 1 and k.shape[2] <= window and view.residue is not None:
            return read(q, view.residue)  # all that is shown is in the window
        if chunk is None or (q.shape[2] == 1 and context.cache is not None):
            mask = beyond(context.positions, view, window)
            return naive(q, k, view.v, mask, view.residue)
        if context.cache is None:  # slots are the queries themselves, in order
            return chunked(q, k, view.v, shift=window, chunk=chunk, valid=view.valid, documents=view.documents)
        order = _Order.of(view, context)
        y = chunked(
            order.queries(q),
            order.slots(k),
            order.slots(view.v),
            shift=window,
            chunk=chunk,
            valid=order.filled,
            state=view.residue,
        )
        return order.back(y)


class _Order:
    """Slots of a store by position, each row's newest token last, whatever slots they are in and wherever rows have padding."""

    def __init__(self, view: KVView, context: Context) -> None:
        newest = context.positions.amax(1)[:, None, None]
        filled = view.valid & (view.positions <= newest)
        places, self._slots = torch.where(filled, view.positions, -1).sort(dim=-1, stable=True)  # [B, 1, S]
        self.filled = places >= 0
        self._queries = context.positions.argsort(dim=1, stable=True)[:, None]  # [B, 1, T]
        self._back = self._queries.argsort(dim=2)

    @classmethod
    def of(cls, view: KVView, context: Context) -> _Order:
        """Layers whose stores place tokens alike have the same."""
        if view.key is None:
            return cls(view, context)
        order: _Order = context.once((cls, view.key), lambda: cls(view, context))
        return order

    def slots(self, x: Tensor) -> Tensor:
        return _taken(x, self._slots)

    def queries(self, x: Tensor) -> Tensor:
        return _taken(x, self._queries)

    def back(self, x: Tensor) -> Tensor:
        return _taken(x, self._back)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, H, S, D] in another order [B, 1, S]."""
    return x.gather(2, index[..., None].expand(-1, x.shape[1], -1, x.shape[3]))
