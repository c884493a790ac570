"""A budgeted sequence on a torch model: what `protocol.Kept` asks for, over a decoder and stores with a scored policy.

Every store of the model keeps its codec and its owner; its policy becomes the one that the scoring names. Keys are kept
unrotated, so nothing is rounded twice however often what is kept moves to other places.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from orchard.cache.policies import KeepAll, KeyDiff, Probe, Recent, Snap
from orchard.cache.store import Cache, Store
from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.generate.memory.arrays import from_arrays, to_arrays
from orchard.generate.memory.protocol import Scoring
from orchard.generate.torch_forward import TorchModel

POLICIES: dict[str, Any] = {"recent": Recent, "keydiff": KeyDiff, "snap": Snap, "probe": Probe}


class StoredModel(TorchModel, Protocol):
    """A torch model that says what its stores are; `orchard.models.language.decoder.Decoder` is one."""

    @property
    def dtype(self) -> torch.dtype: ...

    def stores(self) -> Sequence[Any]:
        """Each layer's store config, in order."""

    def state_dict(self) -> dict[str, Tensor]: ...


class TorchKept:
    """See `protocol.Kept`. One caller at a time. A step that fails leaves what was kept before it."""

    def __init__(
        self,
        model: StoredModel,
        *,
        budget: int,
        block: int,
        sinks: int = 4,
        scoring: Scoring = "recent",
        heads: Literal["uniform", "flat"] = "uniform",
        newest: int | None = None,
        budgets: Sequence[int] | None = None,
    ) -> None:
        """`newest`: so many of the last tokens always stay (None: as the scoring says). `budgets`: by layer that has a store,
        from the beginning on."""
        if scoring not in get_args(Scoring):
            raise ConfigError(f"no scoring {scoring!r}", hint=f"use one of {', '.join(get_args(Scoring))}")
        self.model = model
        self.budget, self.block, self.sinks, self.scoring, self.heads = budget, block, sinks, scoring, heads
        policy = POLICIES[scoring].Config(budget=budget, block=block, sinks=sinks, heads=heads, newest=newest)
        policy.build()  # a budget without room is refused even where no layer has it
        self._policy = policy
        self.layers = [layer for layer, store in enumerate(model.stores()) if _own(store)]
        self.budgets = self._checked([budget] * len(self.layers) if budgets is None else budgets)
        self.cache = self._fresh()
        self.length = 0
        """Where the next token will stand."""

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return self.cache.used

    @property
    def peak(self) -> int:
        return self.cache.peak

    @property
    def room(self) -> int:
        """Tokens that can be read before some must go."""
        return min(slots.capacity - slots.used for slots in self.cache.tables.values())

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @torch.inference_mode()
    def keys(self, layer: int) -> np.ndarray:
        """Heads that hold fewer tokens than others begin with zeros."""
        if layer not in self.cache.stores:
            raise UsageError(
                f"layer {layer} has no store of its own", hint="ask for a layer that keeps keys and values"
            )
        store = self.cache.stores[layer]
        self._learn_rotation()
        keys = store.keys()[0].float()
        counts = (store.slots.positions[0, :, : keys.shape[1]] >= 0).sum(-1).tolist()
        longest = max(counts)
        made = keys.new_zeros(len(counts), longest, keys.shape[2])
        for head, count in enumerate(counts):
            made[head, longest - count :] = keys[head, :count]
        return made.cpu().numpy()

    # Reading, looking, forgetting ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        ids = self._ids(tokens)
        if not 0 <= wanted <= len(ids):
            raise UsageError(f"{wanted} scores of {len(ids)} tokens", hint="ask for as many as are read, or fewer")
        found = []
        for at in range(0, len(ids), self.block):
            part = ids[at : at + self.block]
            if len(part) > self.room:
                self._make_room(len(part))
            asked = max(0, min(len(part), at + len(part) - (len(ids) - wanted)))
            # Layers that keep nothing of their own may be left out, but not where their queries count as well.
            hidden = self._step(part, probe=False, wanted=None if self.scoring == "snap" else asked)
            self.length += len(part)
            if asked:
                found.append(self.model.scores(hidden[-asked:]).float().cpu().numpy())
        return np.concatenate(found) if found else np.empty((0, self.model.config.vocab), np.float32)

    @torch.inference_mode()
    def probe(self, tokens: Sequence[int]) -> None:
        self._step(self._ids(tokens), probe=True, wanted=None)

    @torch.inference_mode()
    def evict(self, budgets: Sequence[int] | None = None) -> None:
        asked = self.budgets if budgets is None else self._checked(budgets)
        self._learn_rotation()
        self.length = int(self.cache.evict(dict(zip(self.layers, asked, strict=True)))[0])
        self.budgets = asked

    def clear(self) -> None:
        """Forget everything."""
        self.cache, self.length = self._fresh(), 0

    # Out and in again ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def save(self) -> dict[str, np.ndarray]:
        about = {**self._about, "budgets": self.budgets, "length": self.length, "peaks": self._peaks()}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8).copy()}
        for layer, store in self.cache.stores.items():
            arrays |= to_arrays(store, str(layer))
        return arrays

    @torch.inference_mode()
    def load(self, arrays: dict[str, np.ndarray]) -> None:
        hint = "read the conversation again"
        try:
            about = json.loads(arrays["about"].tobytes())
            budgets, length, peaks = list(about["budgets"]), int(about["length"]), list(about["peaks"])
            mine = {name: about[name] for name in self._about}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise BadFile(f"this is no saved conversation: {error}", hint=hint) from None
        for name, value in self._about.items():
            if mine[name] != value:
                what = "another model" if name == "model" else f"{name} {mine[name]}, and not {value}"
                raise BadFile(f"this conversation was kept for {what}", hint=hint)
        fresh = self._fresh()
        try:
            budgets = self._checked(budgets)
            for layer, budget, peak in zip(self.layers, budgets, peaks, strict=True):
                from_arrays(fresh.stores[layer], arrays, str(layer), budget + self.block, length)
                fresh.stores[layer].slots.peak = int(peak)  # type: ignore[attr-defined]
        except (KeyError, ValueError, TypeError, RuntimeError, UsageError, ConfigError) as error:
            raise BadFile(f"this saved conversation is damaged: {error}", hint=hint) from None
        self.cache, self.budgets, self.length = fresh, budgets, length

    @cached_property
    def _about(self) -> dict[str, Any]:
        """What another must have in common with this one to take up what it saved."""
        return {
            "model": self._signature(),
            "budget": self.budget,
            "block": self.block,
            "sinks": self.sinks,
            "scoring": self.scoring,
            "heads": self.heads,
        }

    def _signature(self) -> str:
        """Tells keys and values of this model from those of any other: by its tree and samples of all its tensors."""
        known = sha256(repr(self.model.config).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            flat = tensor.reshape(-1)
            ends = torch.cat([flat[:64], flat[-64:]]).contiguous().view(torch.uint8)
            known.update(f"{name} {flat.numel()} ".encode() + ends.cpu().numpy().tobytes())
        return known.hexdigest()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _fresh(self) -> Cache:
        stores = []
        sizes = dict(zip(self.layers, self.budgets, strict=True))
        for layer, store in enumerate(self.model.stores()):
            if not isinstance(store, Store.Config):
                name = type(store).__qualname__
                raise UnsupportedPair(
                    f"layer {layer} keeps {name}, which has no budget", hint="use attention with a Store"
                )
            if store.owner is None and not isinstance(store.policy, KeepAll.Config):
                name = type(store.policy).builds.__name__
                raise UnsupportedPair(
                    f"layer {layer} forgets by its own policy {name}, and cannot by {self.scoring!r} as well",
                    hint="use a model whose stores have the policy KeepAll",
                )
            stores.append(store.clone(policy=self._policy.clone(budget=sizes.get(layer, self.budget))))
        return Cache(stores, batch=1, length=1 << 60, dtype=self.model.dtype, device=self.model.device)

    def _step(self, ids: list[int], *, probe: bool, wanted: int | None) -> Tensor:
        device = self.model.device
        positions = torch.arange(self.length, self.length + len(ids), device=device)[None]
        context = Context(positions, cache=self.cache, probe=probe, wanted=wanted)
        try:
            return self.model.hidden(torch.tensor([ids], device=device), context)[0]
        finally:
            # Stores remember how to rotate, and with it this context: let it not hold the keys and values of a whole step.
            context.views.clear()
            context.memo.clear()

    def _learn_rotation(self) -> None:
        """Only a step tells a store how its layer rotates keys: let one token look where there has been none since loading."""
        if self.length and any(store.rotate is None for store in self.cache.stores.values()):
            kept = [(store.slots, store.slots.scores) for store in self.cache.stores.values()]  # type: ignore[attr-defined]
            self._step([0], probe=True, wanted=None)
            for slots, scores in kept:
                slots.scores = scores  # type: ignore[attr-defined]

    def _make_room(self, tokens: int) -> None:
        if self.scoring == "probe":
            raise UsageError(
                f"{tokens} tokens do not fit beside {self.used} with a budget of {self.budget} + {self.block}",
                hint="probe and evict before reading more",
            )
        self.evict()

    def _peaks(self) -> list[int]:
        return [self.cache.stores[layer].slots.peak for layer in self.layers]  # type: ignore[attr-defined]

    def _checked(self, budgets: Sequence[int]) -> list[int]:
        if len(budgets) != len(self.layers):
            raise UsageError(
                f"{len(budgets)} budgets for {len(self.layers)} layers that have a store",
                hint="give one budget for each",
            )
        if sum(budgets) > self.budget * len(budgets):
            raise UsageError(
                f"budgets of {sum(budgets) / len(budgets):.0f} tokens on average are above {self.budget}",
                hint="share out what there is: budgets add up to budget × layers at most",
            )
        for budget in set(budgets):
            self._policy.clone(budget=budget).build()
        return [int(budget) for budget in budgets]

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        if not ids:
            raise UsageError("no tokens to read", hint="give at least one token id")
        if min(ids) < 0 or max(ids) >= self.model.config.vocab:
            raise UsageError(
                "a token id is outside the vocabulary", hint="encode the text with this model's own tokenizer"
            )
        return ids


def _own(store: Any) -> bool:
    return getattr(store, "owner", None) is None
