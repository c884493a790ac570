"""Softmax attention with every variation the known families need, each a field: grouped heads, window, rotary or no
positions, normalised queries and keys, bounded scores, and a store that may belong to another layer.

Shapes: B sequences, T tokens, Hq query heads, H key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from torch import Tensor, nn

from orchard.cache.store import Store
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context, KVView
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.borrow import Borrow, in_place_of
from orchard.nn.attention.rotary import Rotary
from orchard.nn.formats.base import NotLowered
from orchard.nn.linear import Linear
from orchard.nn.lowering import linear_of, obstacle, part_of
from orchard.nn.norm import RMSNorm
from orchard.ops.attention import attend, visible
from orchard.ops.plan.builder import Builder, Value
from orchard.ops.plan.steps import Norm


class Attention(Configurable, nn.Module):
    """A mixer: reads keys and values only through a `KVView`."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        layer: int = REQUIRED
        heads: int = REQUIRED
        kv_heads: int = REQUIRED
        head_dim: int = REQUIRED
        q: Linear.Config = field(default_factory=Linear.Config)
        k: Linear.Config | None = field(default_factory=Linear.Config)
        v: Linear.Config | None = field(default_factory=Linear.Config)
        o: Linear.Config = field(default_factory=Linear.Config)
        q_norm: RMSNorm.Config | None = None
        k_norm: RMSNorm.Config | None = None
        norm_over: Literal["head", "all"] = "head"
        """Whether q_norm and k_norm see one head (Qwen 3, Gemma 3) or all heads as one vector (OLMo 2, OLMoE)."""
        rotary: Rotary.Config | None = field(default_factory=Rotary.Config)
        """None: no positions at all (NoPE)."""
        window: int | None = None
        """How many tokens back a query sees, itself included; None: all."""
        scale: float | None = None
        softcap: float | None = None
        clip: float | None = None
        """Bound on the magnitude of projected queries, keys and values (OLMoE)."""
        store: Store.Config = field(default_factory=Store.Config)
        borrow: Borrow.Config | None = None
        """Earlier layers that are read by chance while the model learns; None: none is."""

        def wire(self) -> None:
            if self.kv_heads < 1 or self.heads % self.kv_heads:
                raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads}", hint="use a divisor")
            if self.window is not None and self.window < 1:
                raise ConfigError(f"a window of {self.window} shows nothing", hint="use window ≥ 1, or None for all")
            if self.norm_over not in ("head", "all"):
                raise ConfigError(f"norm_over cannot be {self.norm_over!r}", hint="use 'head' or 'all'")
            if self.store.owner is not None:
                self.k = self.v = self.k_norm = self.borrow = None
            elif self.k is None or self.v is None:
                raise ConfigError(
                    "attention without keys or values of its own", hint="name the layer to read: store.owner"
                )
            q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
            self.q.in_dim, self.q.out_dim = self.dim, q_dim
            self.o.in_dim, self.o.out_dim = q_dim, self.dim
            for side in (self.k, self.v):
                if side is not None:
                    side.in_dim, side.out_dim = self.dim, kv_dim
            for norm, whole in ((self.q_norm, q_dim), (self.k_norm, kv_dim)):
                if norm is not None:
                    norm.dim = self.head_dim if self.norm_over == "head" else whole
            if self.rotary is not None:
                self.rotary.dim = self.head_dim
            self.store.heads, self.store.dim = self.kv_heads, self.head_dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.scale = cfg.scale if cfg.scale is not None else cfg.head_dim**-0.5
        self.q: Linear = cfg.q.build()
        self.k: Linear | None = cfg.k.build() if cfg.k is not None else None
        self.v: Linear | None = cfg.v.build() if cfg.v is not None else None
        self.o: Linear = cfg.o.build()
        self.q_norm: RMSNorm | None = cfg.q_norm.build() if cfg.q_norm is not None else None
        self.k_norm: RMSNorm | None = cfg.k_norm.build() if cfg.k_norm is not None else None
        self.rotary: Rotary | None = cfg.rotary.build() if cfg.rotary is not None else None
        self.borrow: Borrow | None = cfg.borrow.build() if cfg.borrow is not None else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self._heads(self.q(x), self.q_norm, self.config.heads)
        if self.rotary is not None:
            q = self.rotary(q, context.places, context)
        y = self._look(q, self._view(x, context), context)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out

    def _look(self, q: Tensor, view: KVView, context: Context) -> Tensor:
        """What queries [B, Hq, T, D] see in a view, inside the window: [B, Hq, T, D]."""
        window = self.config.window
        mask: Tensor | None = None
        if view.causal and (window is None or window >= q.shape[2]):
            pass  # torch knows this mask by its name
        elif view.key is None:
            mask = visible(context.positions, view, window)
        else:
            mask = context.once((view.key, window), lambda: visible(context.positions, view, window))
        softcap = self.config.softcap
        if view.watch is not None:
            view.watch(q, mask, self.scale, softcap)
        if view.attend is not None:
            return view.attend(q, mask, self.scale, softcap)
        return attend(q, view.k, view.v, mask, scale=self.scale, softcap=softcap)

    def _view(self, x: Tensor, context: Context) -> KVView:
        if self.k is None or self.v is None:
            return context.views[self.config.store.owner]  # type: ignore[index]
        k = self._heads(self.k(x), self.k_norm, self.config.kv_heads)
        v = self._heads(self.v(x), None, self.config.kv_heads)
        rotary = self.rotary
        rotate = None if rotary is None else lambda keys, positions: rotary(keys, positions, context)
        own, lent = context.append(self.config.layer, k, v, rotate), self.lent(context)
        return own if lent is None else in_place_of(own, lent)

    def lent(self, context: Context) -> KVView | None:
        """Another layer's keys and values that are read in this step instead of its own: only while the model learns."""
        if self.borrow is None or not self.training or context.cache is not None:
            return None
        return context.lent(self.config.layer, self.borrow.draw)

    def _heads(self, x: Tensor, norm: RMSNorm | None, heads: int) -> Tensor:
        """[B, T, heads · D] → [B, heads, T, D], clipped and normalised on the way."""
        if self.config.norm_over == "all" and norm is not None:
            x = norm(x)
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        x = x.unflatten(-1, (heads, self.config.head_dim))
        if self.config.norm_over == "head" and norm is not None:
            x = norm(x)
        return x.transpose(1, 2)

    def obstacle(self) -> str | None:
        """Why the store of this layer, or what goes into it, has no native form."""
        for inner, says in ((self.q_norm, "scales"), (self.k_norm, "scales"), (self.rotary, "native")):
            if inner is not None and (reason := obstacle(inner, says=says)) is not None:
                return reason
        try:
            self.config.store.native()
        except UnsupportedPair as error:
            return error.message
        return None

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        cfg = self.config
        if (reason := builder.in_torch.get(cfg.layer) or self.obstacle()) is not None:
            raise NotLowered(reason)
        kept = cfg.store.native()
        q = self._lower_heads(builder, self.q, self.q_norm, x, f"{path}.q")
        k = v = None
        if self.k is not None and self.v is not None:
            k = self._lower_heads(builder, self.k, self.k_norm, x, f"{path}.k")
            v = self._lower_heads(builder, self.v, None, x, f"{path}.v")
        y = builder.attend(
            q,
            k,
            v,
            layer=cfg.layer,
            owner=cfg.store.owner,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            dim=cfg.head_dim,
            scale=self.scale,
            q_norm=self._head_norm(builder, self.q_norm, f"{path}.q_norm"),
            k_norm=self._head_norm(builder, self.k_norm, f"{path}.k_norm"),
            rotary=None if self.rotary is None else self.rotary.native(),
            softcap=cfg.softcap,
            window=cfg.window,
            codec=kept.codec,
            keep=kept.keep,
            sinks=kept.sinks,
            books=kept.books,
        )
        return linear_of(builder, self.o, y, f"{path}.o", cfg.dim)

    def _lower_heads(self, builder: Builder, linear: nn.Module, norm: RMSNorm | None, x: Value, path: str) -> Value:
        """`_heads` up to the norm of single heads, which attention itself does."""
        width = self.config.head_dim * (self.config.heads if linear is self.q else self.config.kv_heads)
        y = linear_of(builder, linear, x, path, width)
        if self.config.norm_over == "all" and norm is not None:
            y = part_of(builder, norm, y, f"{path}_norm")
        return y if self.config.clip is None else builder.clip(y, self.config.clip)

    def _head_norm(self, builder: Builder, norm: RMSNorm | None, path: str) -> Norm | None:
        if norm is None or self.config.norm_over == "all":
            return None
        return builder.norm_of(norm.scales(), norm.config.eps, path=path)
