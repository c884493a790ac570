"""What travels with a forward pass, passed explicitly: never a module global.

Shapes: B sequences, T new tokens, S slots seen, H key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], Tensor]
"""`(keys [B, H, S, D], positions [B, 1|H, S]) → keys`: turns unrotated keys into rotated ones."""


Attend = Callable[[Tensor, Tensor | None, float, float | None], Tensor]
"""`(queries [B, Hq, T, D], mask or None, scale, softcap) → [B, Hq, T, D]`."""

Watch = Callable[[Tensor, Tensor | None, float, float | None], None]
"""The same arguments, and nothing comes back."""


@dataclass(frozen=True)
class KVView:
    """The keys and values a layer may look at in this step, whoever stores them and however.

    `positions` and `valid` are [B, 1, S], or [B, H, S] where heads keep different slots. Slots that are not valid hold
    anything finite. `window` and `sinks` are what the policy promises to keep: a query at p sees only keys at positions
    above p - window, or below sinks, so that the answer does not depend on how the input was cut into chunks.
    """

    k: Tensor  # [B, H, S, D]
    v: Tensor  # [B, H, S, D]
    positions: Tensor
    valid: Tensor
    window: int | None = None
    sinks: int = 0
    documents: Tensor | None = None
    """[B, 1, S]: which document of its row a slot belongs to; None: all to the same."""
    causal: bool = False
    """Slots are the queries themselves, in order, all valid: each sees itself and what is before it."""
    key: object = None
    """Views with the same key (not None) share positions and valid, so that a mask is made once for many layers."""
    attend: Attend | None = None
    """Attention straight from how the slots are kept, where the codec can; `k` and `v` are then not to be read."""
    watch: Watch | None = None
    """Who wants to see the queries (rotated, [B, Hq, T, D]) that look at this view, to learn which slots matter."""
    raw: Tensor | None = None
    """The keys before rotation, [B, H, S, D], where they are at hand: without a store, and in stores that have a residue."""
    residue: Tensor | None = None
    """What a store with a residue made of the slots that it no longer shows, [B, H, F, D] (`orchard.cache.residue`)."""


class KVCache(Protocol):
    """All stores of one model for a batch of sequences; `orchard.cache.store.Cache` is the real one."""

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView: ...


@dataclass
class Context:
    """One step's state: where the new tokens stand, the stores, and what layers leave for each other.

    `positions` [B, T] are the tokens' places in their sequences; -1 marks padding, which nothing attends to and nothing
    stores. `upto` is a number the caller knows: no sequence is longer than this after the step, so stores show only so
    many slots (None: all of them).
    """

    positions: Tensor
    cache: KVCache | None = None
    documents: Tensor | None = None
    """[B, T], where rows hold several documents (in training, without stores): nothing looks into another one."""
    causal: bool = False
    """Every row is one sequence from 0 on, without padding or stores, and the caller knows it: no mask has to be made."""
    probe: bool = False
    """The tokens look at what is kept and at each other, and are not kept themselves."""
    upto: int | None = None
    wanted: int | None = None
    """Only the last so many tokens of each sequence are of interest to the caller: all others may be left out of what comes after
    the last layer that keeps something (None: all are)."""
    labels: Tensor | None = None
    """[B]: the group each row belongs to (-1: not known), or [B, groups]: its share of each; for layers that are taught them."""
    units: Mapping[int, Tensor] | None = None
    """Which hidden units a sequence uses, by layer that chooses: weights [B, 1, groups], or [B, T, groups] (None: all)."""
    views: dict[int, KVView] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)
    collected: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def whole(cls, ids: Tensor, valid: Tensor | None = None) -> Context:
        """A context for whole sequences [B, T] that start at 0, without stores; `valid` [B, T] marks padding False."""
        if valid is None:
            places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            return cls(positions=places, causal=True)
        positions = valid.long().cumsum(-1) - 1
        return cls(positions=torch.where(valid, positions, -1))

    def last(self, tokens: int) -> Context:
        """The same step for its last tokens alone, after all of them have been stored."""
        return replace(self, positions=self.positions[:, self.positions.shape[1] - tokens :], wanted=None, memo={})

    def append(self, layer: int, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> KVView:
        """Hand a layer's new keys (not yet rotated) and values over; get back all it may look at. k, v: [B, H, T, D]."""
        if self.cache is not None:
            view = self.cache.append(layer, k, v, self, rotate)
        else:
            positions = self.places
            raw, k = k, rotate(k, positions) if rotate is not None else k
            own = None if self.documents is None else self.documents[:, None, :]
            view = KVView(
                k=k, v=v, positions=positions, valid=self.valid, documents=own, causal=self.causal, key="new", raw=raw
            )
        self.views[layer] = view
        return view

    def lent(self, layer: int, draw: Callable[[], int | None]) -> KVView | None:
        """What another layer left that this one reads in this step, or None. It is drawn once: a block that is computed again
        in the backward pass reads what it read before."""
        source = self.once(("lent", layer), draw)
        return None if source is None else self.views[source]

    @property
    def places(self) -> Tensor:
        """`positions` as [B, 1, T]: the same tensor object through the whole step, so tables made from it are shared."""
        places: Tensor = self.once("places", lambda: self.positions[:, None, :])
        return places

    @property
    def valid(self) -> Tensor:
        """Which of the tokens are no padding, [B, 1, T]."""
        valid: Tensor = self.once("valid", lambda: self.places >= 0)
        return valid

    def collect(self, name: str, value: Tensor) -> None:
        """Leave a side result (a balance loss, a routing count) for whoever runs the model."""
        self.collected.setdefault(name, []).append(value)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that several layers need in one step, made by the first that asks."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]
