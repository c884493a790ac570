"""Unconstrained pruning of a decoder's residual stream: each of q, k, v, gate and up keeps its own channels of what it reads.

    small = PruneInputs(keep=0.75).apply(model)

All layers share one residual stream, so no order of it can suit more than two of its many readers. What a norm writes is read
by two or three maps only, and a norm writes every channel anew in any case. So the order changes there (`OrderedNorm`): one pass
over its output, and each map reads a run of it (`PartLinear`), where a plain export would gather for each map. Two readers never
gather; of three, the cheapest may have to, unless keys and values keep the same channels (`tied`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block
from orchard.nn.tensors import carried, dense_tensor, fill
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.lora_twin import dotted, replaced
from orchard.transforms.prune_activity import mean_inputs
from orchard.transforms.prune_cut import fits
from orchard.transforms.prune_scores import (
    a_share,
    count_of,
    importance,
    keep_best,
    known_importance,
    usual_multiple,
)
from orchard.transforms.upscale_decoder import OrderedNorm, PartLinear
from orchard.transforms.upscale_order import Reader, Wish, arrange

M = TypeVar("M", bound=nn.Module)
Readers = dict[str, list[str]]
"""Norm → the maps that read what it writes, by module path."""


@dataclass(frozen=True)
class Copies:
    """Channels copied for one token: by maps that gather, by norms that write in another order, and by a plain export, in which
    every map that reads less than all gathers."""

    maps: int
    norms: int
    plain: int


@dataclass(frozen=True)
class PruneInputs(Transform):
    """`keep`: the share of channels that each map keeps. `tied`: keys and values keep the same ones. `constrained`: all readers
    of a norm do. `together`: one threshold over all maps. `multiple` as in `Prune`.

    The tree of `__call__` has the right widths with the same share for each map; which channels they are, weights decide.
    """

    keep: float = 0.75
    importance: str = "l2"
    tied: bool = True
    constrained: bool = False
    together: bool = False
    multiple: int | None = None

    learns = True

    def __post_init__(self) -> None:
        known_importance(self.importance)
        a_share("keep", self.keep)

    @property
    def looks(self) -> bool:  # type: ignore[override]
        """Whether `apply` needs texts."""
        return self.importance == "activation"

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        width = count_of(tree.dim, self.keep, self._multiple(tree))
        first = torch.arange(width)
        return _rewritten(tree, {path: first for paths in _readers(tree).values() for path in paths}, {})

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        tree: Any = model.config
        tree = tree.complete()
        kept = self.choose(model, texts, tell)
        orders = {
            norm: order
            for norm, paths in _readers(tree).items()
            if (order := _order(tree.dim, [kept[path] for path in paths if path in kept])) != tuple(range(tree.dim))
        }
        small = _rewritten(tree, kept, orders)
        makers = {path: partial(_cut, path, small) for path in kept}
        made: M = carried(replaced(model, makers) if makers else model, small)
        return made

    def choose(self, model: nn.Module, texts: Sequence[Batch] = (), tell: Tell = silent) -> dict[str, Tensor]:
        """The channels that each map keeps, by module path. Norms all of whose readers keep all are left out."""
        tree: Any = model.config
        tree = tree.complete()
        readers = _readers(tree)
        every = [path for paths in readers.values() for path in paths]
        looked = mean_inputs(model, every, texts, tell) if self.looks else {}
        groups = [group for paths in readers.values() for group in self._groups(paths)]
        scores = {}
        for group in groups:
            vectors = torch.cat([_vectors(model, path, looked.get(path), readers) for path in group], 1)
            # Activations are in the vectors already.
            kind = "l2" if self.importance == "activation" else self.importance
            scores[group[0]] = importance(kind, vectors, where=group[0])
        multiple = self._multiple(tree)
        chosen = keep_best(scores, self.keep, together=self.together, multiple=multiple)
        kept = {path: chosen[group[0]] for group in groups for path in group}
        # Where one reader of a norm loses channels the norm may reorder, and then all its readers have to follow.
        cut = [paths for paths in readers.values() if any(len(kept[path]) < tree.dim for path in paths)]
        return {path: kept[path] for paths in cut for path in paths}

    def _groups(self, paths: Sequence[str]) -> list[list[str]]:
        """Maps that choose together."""
        if self.constrained:
            return [list(paths)]
        shared = [path for path in paths if path.endswith((".k", ".v"))] if self.tied else []
        return [[path] for path in paths if path not in shared] + ([shared] if shared else [])

    def _multiple(self, tree: Any) -> int:
        return usual_multiple(tree.dim) if self.multiple is None else self.multiple


def masked_inputs(model: M, kept: Mapping[str, Tensor]) -> M:
    """The same model with zeros instead: what the smaller one has to equal. Weights become plain ones."""

    def zeroed(path: str, linear: Linear) -> Linear:
        made: Linear = Linear.Config(
            in_dim=linear.shape[1], out_dim=linear.shape[0], bias=linear.bias is not None
        ).build()
        weight = linear.dense()
        made.assign(torch.zeros_like(weight).index_copy(1, kept[path], weight[:, kept[path]]))
        if linear.bias is not None:
            made.bias = linear.bias
        return made.train(linear.training)

    return replaced(model, {path: partial(zeroed, path) for path in kept})


def copies(tree: BaseConfig) -> Copies:
    """What the parts of a tree copy for one token."""
    parts = [node for _, node in tree.find(PartLinear) if node.length < node.whole]
    maps = sum(node.length for node in parts if node.index)
    norms = sum(node.dim for _, node in tree.find(OrderedNorm))
    return Copies(maps, norms, sum(node.length for node in parts))


def _readers(tree: BaseConfig) -> Readers:
    found: Readers = {}
    for path, block in tree.find(Block):
        at = path.replace("[", ".").replace("]", "")
        mixer, mlp = block.mixer, block.mlp
        if type(mixer) is Attention.Config and type(block.mixer_norm) is RMSNorm.Config:
            names = [name for name in ("q", "k", "v") if getattr(mixer, name) is not None]
            found[f"{at}.mixer_norm"] = [f"{at}.mixer.{name}" for name in names]
        if type(mlp) in (GatedMLP.Config, FeedForward.Config) and type(block.mlp_norm) is RMSNorm.Config:
            names = [name for name in ("gate", "up") if hasattr(mlp, name)]
            found[f"{at}.mlp_norm"] = [f"{at}.mlp.{name}" for name in names]
    if not found:
        raise UnsupportedPair("no map of the model reads a norm", hint="only pre-norm layers can be pruned like this")
    odd = [path for paths in found.values() for path in paths if type(tree.get(dotted(path))) is not Linear.Config]
    if odd:
        raise UnsupportedPair(f"{odd[0]} is no plain linear map", hint="prune before anything else is built in")
    return found


def _vectors(model: nn.Module, path: str, activity: Tensor | None, readers: Readers) -> Tensor:
    """Columns of a map, [dim, out], as large as what they say: with the norm's gain, or with what was really read."""
    columns = dense_tensor(model.get_submodule(path), "weight").detach().mT.float()
    if activity is not None:
        return columns * activity[:, None]
    norm: Any = model.get_submodule(next(norm for norm, paths in readers.items() if path in paths))
    return columns * torch.from_numpy(norm.scales()).abs()[:, None].to(columns.device)


def _order(dim: int, wanted: Sequence[Tensor]) -> tuple[int, ...]:
    """An order of what a norm writes that makes runs of most of what its readers keep."""
    sets = [frozenset(part.tolist()) for part in wanted]
    return arrange([range(dim)], [Reader((Wish(0, part),), len(part)) for part in sets])[0]


def _rewritten(tree: Any, kept: Mapping[str, Tensor], orders: Mapping[str, tuple[int, ...]]) -> Any:
    """The tree with norms that reorder and maps that read parts of what they write."""
    natural = tuple(range(tree.dim))
    by_reader = {path: orders.get(norm, natural) for norm, paths in _readers(tree).items() for path in paths}
    tree = tree.clone()  # once: a copy for each of hundreds of maps would take most of the time
    for norm, order in orders.items():
        _put(tree, norm, tree.get(dotted(norm)).derive(OrderedNorm, order=order))
    for path, channels in kept.items():
        order = by_reader[path]
        chosen = set(channels.tolist())
        at = [place for place, channel in enumerate(order) if channel in chosen]
        run = at[-1] - at[0] + 1 == len(at)
        part = {"whole": tree.dim, "start": at[0], "length": len(at), "index": () if run else tuple(at)}
        _put(tree, path, tree.get(dotted(path)).derive(PartLinear, **part))
    tree = tree.complete()
    for path, node in tree.find(PartLinear):
        fits(path, node)
    return tree


def _put(tree: Any, path: str, node: BaseConfig) -> None:
    above, _, name = path.rpartition(".")
    setattr(tree.get(dotted(above)), name, node)


def _cut(path: str, tree: Any, linear: Linear) -> PartLinear:
    """A map with the columns of what it reads, in the order in which it reads them."""
    node = tree.get(dotted(path))
    norm = f"{path.rpartition('.')[0]}_norm"
    written: Any = tree.get(dotted(norm))
    order = written.order if isinstance(written, OrderedNorm.Config) else tuple(range(node.whole))
    places = node.index or range(node.start, node.start + node.length)
    with torch.device("meta"):
        made: PartLinear = node.build()
    for name in ("weight", "bias"):
        if name == "bias" and linear.bias is None:
            continue
        tensor = dense_tensor(linear, name).detach()
        if name == "weight":
            tensor = tensor[:, torch.tensor([order[place] for place in places], device=tensor.device)]
        if not tensor.is_floating_point():
            raise ConfigError(f"{path} holds no numbers", hint="unpack it first")
        fill(made, name, f"{path}.{name}", tensor.clone(), tensor.dtype, tensor.device)
    return made
