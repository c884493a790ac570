"""Store = codec × policy × owner: a layer's keys and values, and all stores of a model together.

The three axes are separate objects. The codec says how a slot is kept, the policy which slots stay, the owner whose
store a layer reads: its own, or that of an earlier layer, which then has neither keys nor values of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchard.cache.codecs import Codec, Parts, Plain
from orchard.cache.exact import Exact
from orchard.cache.policies import HeadSlots, KeepAll, Placement, Policy, Scored, Slots
from orchard.cache.policies.base import spread
from orchard.cache.residue import Residue
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Attend, Context, KVView, Rotate
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.ops.plan.codes import Books


@dataclass(frozen=True)
class NativeStore:
    """A store as the native engine knows it: a codec by name and a window (0: everything is kept)."""

    codec: str
    keep: int
    sinks: int
    books: Books | None = None
    """Codebooks, of a codec "vq"."""


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
            books: Books | None = codec.native_books(self.heads, self.dim) if name == "vq" else None
            if books is not None and window[0]:
                raise UnsupportedPair("codes with a window have no native form", hint="it runs in torch")
            keep, sinks = window
            return NativeStore(name, keep, sinks, books)

    def __init__(self, cfg: Config, *, slots: Slots, dtype: torch.dtype, device: torch.device | None = None) -> None:
        if cfg.owner is not None:
            raise ConfigError(f"this layer reads the store of layer {cfg.owner}", hint="build that layer's store")
        self.config = cfg
        self.slots = slots
        self.dtype = dtype
        self.codec: Codec = cfg.codec.build()
        self.rotate: Rotate | None = None
        """How this layer turns keys, from the last step: for whoever looks at kept keys between steps."""
        batch, count = slots.positions.shape[0], slots.capacity + 1
        self.parts: dict[str, Parts] = {
            role: {
                name: torch.zeros((batch, cfg.heads, count, *shape), dtype=kind, device=device)
                for name, (shape, kind) in self.codec.layout(cfg.dim, dtype).items()
            }
            for role in ("k", "v")
        }
        sinks = self.codec.sinks
        self.exact = Exact(batch, cfg.heads, sinks, cfg.dim, dtype, device) if sinks else None
        self.residue: Residue | None = None
        if cfg.residue is not None:
            sizes = {"batch": batch, "heads": cfg.heads, "width": cfg.dim}
            self.residue = cfg.residue.build(**sizes, dtype=dtype, device=device)
        self.turns_late = self.codec.before_rotation or slots.policy.unrotated or self.residue is not None

    def append(self, k: Tensor, v: Tensor, placement: Placement, positions: Tensor, rotate: Rotate | None) -> KVView:
        """Keep new keys and values [B, H, T, D] and show what may be looked at. `positions` [B, 1, T] are the tokens'."""
        policy = self.slots.policy
        if rotate is not None and not self.turns_late:
            k = rotate(k, positions)
        gone = None if self.residue is None else self._replaced(placement)
        coded = {role: self._append(x, role, placement, positions) for role, x in (("k", k), ("v", v))}
        raw = rest = None
        attend = self._straight(coded, placement, rotate) if positions.shape[-1] == 1 else None
        if attend is not None:
            seen = dict.fromkeys(coded, k[:, :, :0])
        else:
            seen = {role: self._decode(parts, role) for role, parts in coded.items()}
            if self.residue is not None:
                raw, rest = seen["k"], self.residue.sum
                if placement.with_new:  # what leaves is still shown
                    rest, gone = rest.clone(), (raw, seen["v"])
                if gone is not None and placement.writes:
                    self.residue.add(*gone, placement.left)
            if rotate is not None and self.turns_late:
                seen["k"] = rotate(seen["k"], placement.positions)
        watch = None
        if isinstance(policy, Scored) and isinstance(self.slots, HeadSlots) and not torch.compiler.is_compiling():
            self.rotate = rotate
            watch = policy.watch(self.slots, placement, positions, seen["k"])
        return KVView(
            k=seen["k"],
            v=seen["v"],
            positions=placement.positions,
            valid=placement.valid,
            window=policy.window,
            sinks=policy.sinks,
            key=self.slots,
            attend=attend,
            watch=watch,
            raw=raw,
            residue=rest,
        )

    def _replaced(self, placement: Placement) -> tuple[Tensor, Tensor] | None:
        """The keys and values [B, H, T, D] in the slots that new tokens are about to take, where any is lost by that."""
        if placement.left is None or placement.with_new:
            return None
        found = {}
        for role, kept in self.parts.items():
            parts = {name: part.gather(2, spread(placement.index[:, None, :], part)) for name, part in kept.items()}
            found[role] = self._decode(parts, role)
        return found["k"], found["v"]

    def _append(self, x: Tensor, role: str, placement: Placement, positions: Tensor) -> Parts:
        """Keep one side of the new tokens; all of it that is seen, as it is kept."""
        new = self.codec.encode(x, role)  # type: ignore[arg-type]
        if self.exact is not None and placement.writes:
            new = self.exact.put(new, x, role, positions)
        kept = self.parts[role]
        if placement.with_new:
            before = self._shown(role, placement.upto)
            shown = {name: torch.cat([before[name], new[name].to(kept[name].dtype)], dim=2) for name in kept}
        if placement.writes:
            for name, part in kept.items():
                self.slots.write(part, new[name], placement)
        if not placement.with_new:
            shown = self._shown(role, placement.upto)
        return shown

    def _decode(self, parts: Parts, role: str) -> Tensor:
        made = self.codec.decode(parts, role, self.dtype)  # type: ignore[arg-type]
        return made if self.exact is None else self.exact.show(parts, made, role)

    def _straight(self, coded: dict[str, Parts], placement: Placement, rotate: Rotate | None) -> Attend | None:
        """Attention from how slots are kept, where the codec can and nobody wants to see keys."""
        if isinstance(self.slots.policy, Scored) or self.residue is not None:
            return None
        slots = self.codec.attended(coded["k"], coded["v"])
        if slots is None:
            return None
        kept = None if self.exact is None else self.exact.kept(coded["k"])
        return lambda q, mask, scale, softcap: slots.attend(q, mask, scale, softcap, placement.positions, rotate, kept)

    def _shown(self, role: str, upto: int) -> Parts:
        return {name: self.slots.shown(part, upto) for name, part in self.parts[role].items()}

    # Forgetting -------------------------------------------------------------------------------------------------------

    def scored(self) -> tuple[Scored, HeadSlots]:
        """The policy and its table, where this store can forget."""
        policy = self.slots.policy
        if not isinstance(policy, Scored) or not isinstance(self.slots, HeadSlots):
            name = type(policy).__name__
            raise UnsupportedPair(
                f"a store with policy {name} has no budget", hint="use KeyDiff, Snap, Probe or Recent"
            )
        return policy, self.slots

    def keys(self) -> Tensor:
        """What is held [B, H, S, D], rotated to where it stands now."""
        upto = self.slots.reach(None)
        keys = self._decode(self._shown("k", upto), "k")
        return (
            self.rotate(keys, self.slots.positions[:, :, :upto])
            if self.turns_late and self.rotate is not None
            else keys
        )

    def choose(self, budget: int | None) -> Tensor:
        """Which slots are the best: bool [B, H, S]."""
        policy, slots = self.scored()
        return policy.choose(slots, self.keys, policy.budget if budget is None else budget)

    def forget(self, stays: Tensor, last: Tensor, budget: int | None = None) -> None:
        """Keep these slots only. What stays ends at position `last` [B], in every head."""
        policy, _ = self.scored()
        counts = stays.sum(-1, keepdim=True)
        longest = int(counts.amax())
        order = (~stays).to(torch.uint8).sort(dim=2, stable=True).indices[:, :, :longest]
        place = torch.arange(longest, device=stays.device)
        positions = torch.where(place < counts, last[:, None, None] - counts + 1 + place, -1)
        held: dict[str, Parts] = {
            role: {
                name: part.gather(2, spread(order, part)) for name, part in self._shown(role, stays.shape[2]).items()
            }
            for role in self.parts
        }
        self.fill(held, positions, (policy.budget if budget is None else budget) + policy.block)

    def fill(self, held: dict[str, Parts], positions: Tensor, capacity: int) -> None:
        """Hold just these, in order: parts [B, H, S, …] at positions [B, H, S] (-1: nothing)."""
        move = self.scored()[1].fill(positions, capacity)
        self.parts = {role: {name: move(part) for name, part in parts.items()} for role, parts in held.items()}

    def make_room(self, positions: Tensor, rotate: Rotate | None) -> None:
        """Forget what matters least where the new tokens at `positions` [B, T] would not fit."""
        policy, slots = self.scored()
        if not policy.by_itself or slots.fits(positions):
            return
        self.rotate = rotate
        held = slots.positions.amax((1, 2))
        first = torch.where(positions >= 0, positions, torch.iinfo(torch.long).max).amin(1)
        self.forget(self.choose(None), torch.minimum(first - 1, held))

    def keep(self, rows: Tensor) -> None:
        self.parts = {
            role: {name: part.index_select(0, rows) for name, part in parts.items()}
            for role, parts in self.parts.items()
        }
        for beside in (self.exact, self.residue):
            if beside is not None:
                beside.keep(rows)

    @property
    def nbytes(self) -> int:
        beside = sum(one.nbytes for one in (self.exact, self.residue) if one is not None)
        return beside + sum(part.nbytes for parts in self.parts.values() for part in parts.values())


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
            policy: Policy = cfg.policy.build()
            key = (type(cfg.policy), repr(cfg.policy), layer if policy.per_layer else None)
            if key not in self.tables:
                self.tables[key] = policy.slots(batch, cfg.heads, length, device)
            self.stores[layer] = cfg.build(slots=self.tables[key], dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        store = self.stores[layer]
        slots = store.slots
        if context.probe:
            placement = context.once(slots, lambda: slots.look(context.positions, context.upto))
        else:
            if isinstance(slots, HeadSlots) and not torch.compiler.is_compiling():
                store.make_room(context.positions, rotate)
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

    def evict(self, budgets: Mapping[int, int] | None = None) -> Tensor:
        """Keep the best tokens of every store: as many as its policy says, or as `budgets` says by layer. What stays is numbered
        from 0, so that all stores end at the same position; how long each sequence is now, [B]."""
        asked = {layer: (budgets or {}).get(layer) for layer in self.stores}
        stays = {layer: store.choose(asked[layer]) for layer, store in self.stores.items()}
        lengths = torch.stack([chosen.sum(-1).amax(-1) for chosen in stays.values()]).amax(0)
        for layer, store in self.stores.items():
            store.forget(stays[layer], lengths - 1, asked[layer])
        return lengths

    @property
    def used(self) -> int:
        """The most tokens per head that any layer holds."""
        return max(slots.used for slots in self.tables.values())

    @property
    def peak(self) -> int:
        """The most that any layer with a budget ever held; of the others, what they hold."""
        return max(slots.peak if isinstance(slots, HeadSlots) else slots.used for slots in self.tables.values())

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())
