"""Where a channel can be made larger in one weight and smaller before it, so that a model stays what it was (arXiv 2306.00978).

What a linear map reads, column by column, comes from a norm or from the rows of another linear map. Dividing there by s and
multiplying the columns by s changes nothing, before rounding. `folds_of` finds these places in a block:

    mixer_norm → q, k, v      mlp_norm → gate, up      up → down      v → o (heads that share a key/value head have one s)

and says why another place has none: no norm before it, keys and values of another layer, experts, something between that is not
linear.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchard.nn.attention.attention import Attention
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm

Tensors = dict[str, Tensor]
"""Dense tensors by Orchard's names."""


@dataclass(frozen=True)
class Fold:
    """One place: what `source` gives, channel by channel, is all that the `readers` read."""

    source: str
    readers: tuple[str, ...]
    offset: float | None = None
    """Of a norm, whose weight is meant with it; None: the source is a linear map."""
    heads: tuple[int, int, int] | None = None
    """(key/value heads, query heads for each of them, head width), where channels are read by several heads."""

    def spread(self, scales: Tensor) -> Tensor:
        """From the source's channels to the readers' columns."""
        if self.heads is None:
            return scales
        owners, repeats, width = self.heads
        return scales.view(owners, 1, width).expand(owners, repeats, width).flatten()

    def gather(self, squares: Tensor) -> Tensor:
        """From the readers' columns to the source's channels: the mean."""
        if self.heads is None:
            return squares
        return squares.view(self.heads).mean(1).flatten()

    def exact(self, tensors: Tensors, scales: Tensor) -> Tensor:
        """The scales nearest to these that the source can take: a norm's weight is rounded to its own type again, and what that
        changed goes into the scales. A channel that the norm switches off stays as it is."""
        if self.offset is None:
            return scales
        weight = tensors[f"{self.source}.weight"]
        gain = weight.float() + self.offset
        after = ((gain / scales) - self.offset).to(weight.dtype).float() + self.offset
        usable = (gain != 0) & (after != 0) & after.isfinite()
        return torch.where(usable, gain / after, 1.0)

    def apply(self, tensors: Tensors, scales: Tensor) -> None:
        """Change the tensors; the scales are `exact`."""
        name = f"{self.source}.weight"
        if self.offset is not None:
            weight = tensors[name]
            after = (weight.float() + self.offset) / scales - self.offset
            tensors[name] = torch.where(scales == 1, weight, after.to(weight.dtype))
        else:
            tensors[name] = tensors[name].float() / scales[:, None]
            bias = tensors.get(f"{self.source}.bias")
            if bias is not None:
                tensors[f"{self.source}.bias"] = (bias.float() / scales).to(bias.dtype)
        columns = self.spread(scales)
        for reader in self.readers:
            tensors[f"{reader}.weight"] = tensors[f"{reader}.weight"].float() * columns


def folds_of(block: Any, path: str, targets: Container[str], shared: bool = False) -> tuple[list[Fold], list[str]]:
    """The folds of a block, and why it has no others. Only weights among the `targets` are changed: others would be rounded
    for nothing. `shared`: other layers read this one's keys and values."""
    folds: list[Fold] = []
    notes: list[str] = []
    for what, found in _candidates(block, path, shared):
        if isinstance(found, str):
            notes.append(f"{what}: {found}")
            continue
        changed = found.readers if found.offset is not None else (found.source, *found.readers)
        missing = [name for name in changed if name not in targets]
        if missing:
            if len(missing) < len(changed):
                notes.append(f"{what}: {missing[0]} is not quantised with the others, so no scale goes through it")
        else:
            folds.append(found)
    return folds, notes


def _candidates(block: Any, path: str, shared: bool) -> list[tuple[str, Fold | str]]:
    return [*_mixer(block, path, shared), *_mlp(block, path)]


def _mixer(block: Any, path: str, shared: bool) -> list[tuple[str, Fold | str]]:
    mixer: Any = getattr(block, "mixer", None)
    into, out = f"{path}.mixer (q, k, v)", f"{path}.mixer.o"
    if type(mixer) is not Attention:
        why = f"{type(mixer).__name__} is not known to take scales"
        return [(f"{path}.mixer", why)]
    cfg = mixer.config
    names = tuple(name for name in ("q", "k", "v") if getattr(mixer, name) is not None)
    found: list[tuple[str, Fold | str]] = [(into, _after_norm(block, mixer, path, "mixer", names))]
    why = ""
    if mixer.v is None or shared:
        why = "values are shared with another layer"
    elif cfg.clip is not None:
        why = "values are clipped on the way"
    else:
        why = _special(mixer, ("v", "o"))
    heads = (cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim)
    fold = Fold(f"{path}.mixer.v", (f"{path}.mixer.o",), heads=heads)
    return [*found, (out, why or fold)]


def _mlp(block: Any, path: str) -> list[tuple[str, Fold | str]]:
    mlp: Any = getattr(block, "mlp", None)
    if type(mlp) is not GatedMLP:
        why = "experts are rounded to nearest" if hasattr(mlp, "router") else "it is not linear in what it reads"
        return [(f"{path}.mlp", why)]
    fold = Fold(f"{path}.mlp.up", (f"{path}.mlp.down",))
    return [
        (f"{path}.mlp (gate, up)", _after_norm(block, mlp, path, "mlp", ("gate", "up"))),
        (f"{path}.mlp.down", _special(mlp, ("up", "down")) or fold),
    ]


def _after_norm(block: Any, part: nn.Module, path: str, name: str, readers: tuple[str, ...]) -> Fold | str:
    norm = getattr(block, f"{name}_norm", None)
    if type(norm) is not RMSNorm:
        return "no norm stands before it that could take a scale"
    special = _special(part, readers)
    if special:
        return special
    return Fold(f"{path}.{name}_norm", tuple(f"{path}.{name}.{reader}" for reader in readers), norm.config.offset)


def _special(part: nn.Module, names: tuple[str, ...]) -> str:
    """Why a scale cannot go through these maps."""
    odd = [name for name in names if type(getattr(part, name)) is not Linear]
    return f"{odd[0]} is a {type(getattr(part, odd[0])).__name__}, which a scale would change" if odd else ""
