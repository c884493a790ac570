"""Keys and values of some layers only: every other layer reads those of the last one before it that is kept.

The use of a model that learnt with `RouteKV` (R-CLA, arXiv 2604.22782): of L layers any set may be kept that has the first one in
it, and the memory of a conversation is that share of what it was, exactly. A layer that is not kept loses its key and value maps.
Of a fresh model it is cross-layer attention with a fixed pattern (CLA, arXiv 2405.12981). A model that learnt neither loses
much by it: with texts, output maps are fitted to what they read now (share_kv_fit.py), and the rest has to be healed (`heals`).

Where layers see differently far (windows), each reads the last kept one that sees as far, and `every` and `share` count layers of
each kind by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import nn

from orchard.core.batch import Batch
from orchard.core.config import REQUIRED
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.owners import alike, attentions, sees
from orchard.transforms.reformat import learning_like
from orchard.transforms.share_kv_fit import fit_readers

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Retain(Transform):
    """One of three: `layers` by number, the first of `every` so many, or a `share` of all, evenly spread."""

    layers: tuple[int, ...] | None = None
    every: int | None = None
    share: float | None = None
    fit: bool = True
    """Fit the output maps of layers that lose their keys and values, where texts are given."""
    notes: list[str] = field(default_factory=list, compare=False, repr=False)
    """What was left as it is, once it was applied."""

    heals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.layers, self.every, self.share)) != 1:
            raise ConfigError(
                "which layers keep keys and values?", hint="give one of layers=[0,4], every=4, share=0.25"
            )
        if self.every is not None and not _whole(self.every, 1):
            raise ConfigError(f"every is {self.every!r}", hint="use a whole number from 1")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share!r}", hint="use a number above 0, up to 1")
        if self.layers is not None:
            wrong = [one for one in self.layers if not _whole(one, 0)]
            if wrong or len(set(self.layers)) != len(self.layers):
                raise ConfigError(
                    f"layers are {list(self.layers)!r}", hint="name layers by number, from 0, each of them once"
                )

    def kept(self, tree: Any) -> list[int]:
        """The layers that keep keys and values; `ConfigError` names what cannot be."""
        mixers = attentions(tree)
        own = [layer for layer, mixer in enumerate(mixers) if mixer.store.owner is None]
        if self.layers is not None:
            _check(self.layers, mixers)
            return sorted(self.layers)
        kinds: list[list[int]] = []
        for layer in own:
            same = next((kind for kind in kinds if alike(mixers[kind[0]], mixers[layer])), None)
            if same is None:
                kinds.append([layer])
            else:
                same.append(layer)
        return sorted(layer for kind in kinds for layer in self._spread(kind))

    def _spread(self, layers: Sequence[int]) -> Iterable[int]:
        if self.every is not None:
            return layers[:: self.every]
        count = max(1, round(float(self.share or 0) * len(layers)))
        return [layers[place * len(layers) // count] for place in range(count)]

    def __call__(self, tree: Any) -> Any:
        """The completed tree; of one whose vocabulary is not known yet, the tree as far as it goes."""
        tree = tree.clone() if tree.vocab is REQUIRED else tree.complete()
        mixers, kept = attentions(tree), self.kept(tree)
        for layer, mixer in enumerate(mixers):
            if layer not in kept:
                mixer.store.owner = _owner(mixers, layer, kept)
                mixer.k = mixer.v = mixer.k_norm = mixer.borrow = None
            elif mixer.borrow is not None:
                sources = tuple(source for source in mixer.borrow.layers if source in kept)
                mixer.borrow = mixer.borrow.clone(layers=sources) if sources else None
        return tree if tree.vocab is REQUIRED else tree.complete()

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        made = learning_like(super().apply(model, texts, tell), model)
        if texts and self.fit:
            self.notes[:] = fit_readers(model, made, texts, tell)
        tell(1.0)
        return made


def _owner(mixers: Sequence[Any], layer: int, kept: Sequence[int]) -> int:
    """The last kept layer before this one that it can read."""
    found = [other for other in kept if other < layer and alike(mixers[other], mixers[layer])]
    if not found:
        raise UnsupportedPair(
            f"layer {layer} sees {sees(mixers[layer])}, and no layer before it that is kept has such keys and values",
            hint=f"keep layer {layer} too, or an earlier one with the same window, heads and rotary positions",
        )
    return found[-1]


def _check(layers: Sequence[int], mixers: Sequence[Any]) -> None:
    beyond = [layer for layer in layers if layer >= len(mixers)]
    if beyond:
        raise ConfigError(f"there is no layer {beyond[0]}", hint=f"this model has layers 0 to {len(mixers) - 1}")
    if 0 not in layers:
        raise ConfigError("the first layer is not kept, and has none before it to read", hint="keep layer 0 too")
    for layer in layers:
        if mixers[layer].store.owner is not None:
            raise ConfigError(
                f"layer {layer} reads the keys and values of layer {mixers[layer].store.owner} and has none to keep",
                hint="leave it out, or begin from the model as it was",
            )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
