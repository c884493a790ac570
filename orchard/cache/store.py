"""Store = codec × policy × owner: a layer's keys and values, and all stores of a model together.

The three axes are separate objects. The codec says how a slot is kept, the policy which slots stay, the owner whose
store a layer reads: its own, or that of an earlier layer, which then has neither keys nor values of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchard.cache.codecs import Codec, Parts, Plain
from orchard.cache.policies import KeepAll, Placement, Policy, Slots
from orchard.cache.residue import Residue
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context, KVView, Rotate
from orchard.core.errors import ConfigError, UnsupportedPair


@dataclass(frozen=True)
class NativeStore:
    """A store as the native engine knows it: a codec by name and a window (0: everything is kept)."""

    codec: str
    keep: int
    sinks: int


class Store(Configurable):
    """One layer's slots for a batch of sequences."""

    @config
    class Config(BaseConfig):
        heads: int = REQUIRED
        dim: int = REQUIRED
        codec: BaseConfig = field(default_factory=Plain.Config)
        policy: BaseConfig = field(default_factory=KeepAll.Config)
        owner: int | None = None
        """The layer whose store is read; None: this layer's own."""
        residue: Residue.Config | None = None
        """Sum up what leaves the store; None: it is forgotten. A mixer that reads the sum asks for it."""

        def wire(self) -> None:
            policy: Any = self.policy.builds
            if self.residue is not None and not policy.tells:
                raise UnsupportedPair(
                    f"the policy {policy.__name__} does not tell what leaves, and this store sums that up",
                    hint="use the policy Window or KeepAll in layers with a residue",
                )

        def native(self) -> NativeStore:
            """The same for a plan; `UnsupportedPair` where codec or policy do not say that they have a native form."""
            if self.residue is not None:
                raise UnsupportedPair("a store with a residue has no native form", hint="it runs in torch")
            codec, policy = self.codec.build(), self.policy.build()
            name = vars(type(codec)).get("native")
            if name is None:
                raise UnsupportedPair(f"the codec {type(codec).__name__} has no native form", hint="it runs in torch")
            window = policy.native_window() if "native_window" in vars(type(policy)) else None
            if window is None:
                raise UnsupportedPair(f"the policy {type(policy).__name__} has no native form", hint="it runs in torch")
            return NativeStore(name, *window)

    def __init__(self, cfg: Config, *, slots: Slots, dtype: torch.dtype, device: torch.device | None = None) -> None:
        if cfg.owner is not None:
            raise ConfigError(f"this layer reads the store of layer {cfg.owner}", hint="build that layer's store")
        self.config = cfg
        self.slots = slots
        self.dtype = dtype
        self.codec: Codec = cfg.codec.build()
        batch, count = slots.positions.shape[0], slots.capacity + 1
        self.parts: dict[str, Parts] = {
            role: {
                name: torch.zeros((batch, cfg.heads, count, *shape), dtype=kind, device=device)
                for name, (shape, kind) in self.codec.layout(cfg.dim, dtype).items()
            }
            for role in ("k", "v")
        }
        self.residue: Residue | None = None
        if cfg.residue is not None:
            sizes = {"batch": batch, "heads": cfg.heads, "width": cfg.dim}
            self.residue = cfg.residue.build(**sizes, dtype=dtype, device=device)
        self.turns_late = self.codec.before_rotation or self.residue is not None

    def append(self, k: Tensor, v: Tensor, placement: Placement, positions: Tensor, rotate: Rotate | None) -> KVView:
        """Keep new keys and values [B, H, T, D] and show what may be looked at. `positions` [B, 1, T] are the tokens'."""
        if rotate is not None and not self.turns_late:
            k = rotate(k, positions)
        gone = None if self.residue is None else self._replaced(placement)
        seen = {"k": self._append(k, "k", placement), "v": self._append(v, "v", placement)}
        raw = rest = None
        if self.residue is not None:
            raw, rest = seen["k"], self.residue.sum
            if placement.with_new:  # what leaves is still shown
                rest, gone = rest.clone(), (raw, seen["v"])
            if gone is not None:
                self.residue.add(*gone, placement.left)
        if rotate is not None and self.turns_late:
            seen["k"] = rotate(seen["k"], placement.positions)
        policy = self.slots.policy
        return KVView(
            k=seen["k"],
            v=seen["v"],
            positions=placement.positions,
            valid=placement.valid,
            window=policy.window,
            sinks=policy.sinks,
            key=self.slots,
            raw=raw,
            residue=rest,
        )

    def _replaced(self, placement: Placement) -> tuple[Tensor, Tensor] | None:
        """The keys and values [B, H, T, D] in the slots that new tokens are about to take, where any is lost by that."""
        if placement.left is None or placement.with_new:
            return None
        found = {}
        for role, kept in self.parts.items():
            parts = {name: part.gather(2, _slots(placement.index, part)) for name, part in kept.items()}
            found[role] = self.codec.decode(parts, role, self.dtype)  # type: ignore[arg-type]
        return found["k"], found["v"]

    def _append(self, x: Tensor, role: str, placement: Placement) -> Tensor:
        new = self.codec.encode(x, role)  # type: ignore[arg-type]
        kept = self.parts[role]
        before = {name: part[:, :, : placement.upto] for name, part in kept.items()}
        if placement.with_new:
            shown = {name: torch.cat([before[name], new[name].to(kept[name].dtype)], dim=2) for name in kept}
        for name, part in kept.items():
            part.scatter_(2, _slots(placement.index, part), new[name].to(part.dtype))
        return self.codec.decode(shown if placement.with_new else before, role, self.dtype)  # type: ignore[arg-type]

    def keep(self, rows: Tensor) -> None:
        self.parts = {
            role: {name: part.index_select(0, rows) for name, part in parts.items()}
            for role, parts in self.parts.items()
        }
        if self.residue is not None:
            self.residue.keep(rows)

    @property
    def nbytes(self) -> int:
        slots = sum(part.nbytes for parts in self.parts.values() for part in parts.values())
        return slots if self.residue is None else slots + self.residue.nbytes


def _slots(index: Tensor, part: Tensor) -> Tensor:
    """Slots [B, T] as an index into a part [B, H, S, …]."""
    index = index[:, None, :].unflatten(2, (-1, *[1] * (part.dim() - 3)))
    return index.expand(-1, part.shape[1], -1, *part.shape[3:])


class Cache:
    """All stores of a model for a batch. Layers with equal policies share one table of slots."""

    def __init__(
        self,
        configs: Sequence[Store.Config | None],
        *,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """By the layer's number; None: another process keeps that one."""
        self.length = length
        self.tables: dict[object, Slots] = {}
        self.stores: dict[int, Store] = {}
        for layer, cfg in enumerate(configs):
            if cfg is None or cfg.owner is not None:
                continue
            key = (type(cfg.policy), repr(cfg.policy))
            if key not in self.tables:
                policy: Policy = cfg.policy.build()
                self.tables[key] = Slots(policy, batch, length, device)
            self.stores[layer] = cfg.build(slots=self.tables[key], dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        store = self.stores[layer]
        slots = store.slots
        placement = context.once(slots, lambda: slots.place(context.positions, context.upto))
        return store.append(k, v, placement, context.places, rotate)

    def rewind(self, lengths: Tensor) -> None:
        """Forget every token at or after `lengths` [B]; refused by policies that cannot."""
        for slots in self.tables.values():
            slots.check_rewind()  # all of them first: a refusal must leave every table as it was
        for slots in self.tables.values():
            slots.rewind(lengths)

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""
        for slots in self.tables.values():
            slots.keep(rows)
        for store in self.stores.values():
            store.keep(rows)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())
