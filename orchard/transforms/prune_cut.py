"""Taking hidden units and groups of heads out of a built decoder: the weights of what is left, in a tree of smaller widths.

A hidden unit is a row of gate and up and a column of down. A group is one key/value head with all query heads that read it: rows
of q, k and v, columns of o. Layers that read another layer's store lose the same groups as its owner. A packed weight is
unpacked, cut and packed again, which may round anew: prune first, pack afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import HeadNorm, RMSNorm
from orchard.nn.tensors import carried, dense_tensor, fill
from orchard.transforms.lora_linear import LoraLinear
from orchard.transforms.lora_twin import dotted, replaced
from orchard.transforms.prune_masks import MaskedMLP

M = TypeVar("M", bound=nn.Module)
Picks = Mapping[str, Tensor]
"""Path of a module (`stack.layers.3.mlp`) → what stays of it."""
AXES = {"weight": (0, 1), "bias": (0, None), "lora_a": (None, 1), "lora_b": (0, None), "lora_magnitude": (0, None)}
"""Which dimension of a linear map's tensors are its outputs, and which its inputs."""


def mlps(tree: BaseConfig) -> dict[str, Any]:
    """The MLPs whose hidden units can go, by module path."""
    return {_module(path): node for path, node in tree.walk() if isinstance(node, GatedMLP.Config | FeedForward.Config)}


def mixers(tree: BaseConfig) -> dict[int, list[tuple[str, Any]]]:
    """Attention layers that share key/value heads, by the number of the layer that owns them."""
    found: dict[int, list[tuple[str, Any]]] = {}
    for path, node in tree.find(Attention):
        owner = node.layer if node.store.owner is None else node.store.owner
        found.setdefault(owner, []).append((_module(path), node))
    return found


def narrowed(tree: Any, widths: Mapping[str, int], groups: Mapping[str, int]) -> Any:
    """The tree with fewer hidden units and fewer groups of heads, by module path. What a format cannot hold is named."""
    tree = tree.clone()
    for path, width in widths.items():
        node = tree.get(dotted(path))
        node.hidden_dim = width
        if isinstance(node, MaskedMLP.Config):
            tree = tree.set(dotted(path), node.derive(GatedMLP))
    for path, count in groups.items():
        node = tree.get(dotted(path))
        node.heads, node.kv_heads = node.heads // node.kv_heads * count, count
    tree = tree.complete()
    changed = (*widths, *groups)
    for path, node in tree.find(Linear):
        if _module(path).rpartition(".")[0] in changed:
            fits(path, node)
    return tree


def cut(model: M, units: Picks, groups: Picks) -> M:
    """A new model with only these hidden units and groups of heads."""
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path, kept in units.items():
        mlp = model.get_submodule(path)
        for name in ("gate", "up", "down"):
            if hasattr(mlp, name):
                rows, cols = (None, kept) if name == "down" else (kept, None)
                makers[f"{path}.{name}"] = partial(cut_linear, f"{path}.{name}", rows=rows, cols=cols)
    for path, kept in groups.items():
        makers |= _cut_heads(path, model.get_submodule(path), kept)
    tree: Any = model.config
    widths = {path: len(kept) for path, kept in units.items()}
    smaller = narrowed(tree.complete(), widths, {path: len(kept) for path, kept in groups.items()})
    made: M = carried(replaced(model, makers) if makers else model, smaller)
    return made


def _cut_heads(path: str, mixer: Any, kept: Tensor) -> dict[str, Callable[[Any], nn.Module]]:
    cfg = mixer.config
    own = _channels(kept, cfg.head_dim)
    queries = _channels(kept, cfg.head_dim * (cfg.heads // cfg.kv_heads))
    makers: dict[str, Callable[[Any], nn.Module]] = {
        f"{path}.q": partial(cut_linear, f"{path}.q", rows=queries),
        f"{path}.o": partial(cut_linear, f"{path}.o", cols=queries),
    }
    for name in ("k", "v"):
        if getattr(mixer, name) is not None:
            makers[f"{path}.{name}"] = partial(cut_linear, f"{path}.{name}", rows=own)
    if cfg.norm_over == "all":
        for name, channels in (("q_norm", queries), ("k_norm", own)):
            if getattr(mixer, name) is not None:
                makers[f"{path}.{name}"] = partial(_cut_norm, kept=channels)
    for name in ("near_norm", "far_norm"):
        if hasattr(mixer, name):
            makers[f"{path}.{name}"] = partial(_cut_norm, kept=queries)
    return makers


def _channels(groups: Tensor, each: int) -> Tensor:
    return (groups[:, None] * each + torch.arange(each, device=groups.device)).flatten()


def cut_linear(path: str, linear: nn.Module, rows: Tensor | None = None, cols: Tensor | None = None) -> nn.Module:
    """The same linear map with only these outputs (rows) and inputs (cols)."""
    if type(linear) not in (Linear, LoraLinear):
        raise UnsupportedPair(f"{path} is a {type(linear).__name__}, which cannot be cut", hint="prune before that")
    cfg: Any = linear.config
    out_dim, in_dim = (linear.shape[i] if kept is None else len(kept) for i, kept in enumerate((rows, cols)))  # type: ignore[index]
    with torch.device("meta"):
        made: nn.Module = cfg.clone(out_dim=out_dim, in_dim=in_dim).build()
    for name, axes in AXES.items():
        if name != "weight" and getattr(linear, name, None) is None:
            continue
        tensor = dense_tensor(linear, name).detach()
        for axis, kept in zip(axes, (rows, cols), strict=True):
            if axis is not None and kept is not None:
                tensor = tensor.index_select(axis, kept.to(tensor.device))
        dtype = tensor.dtype if tensor.is_floating_point() else torch.float32
        fill(made, name, f"{path}.{name}", tensor.clone(), dtype, tensor.device)
    return made


def _cut_norm(norm: RMSNorm | HeadNorm, kept: Tensor) -> nn.Module:
    made: RMSNorm | HeadNorm = norm.config.clone(dim=len(kept)).build()
    made.weight = nn.Parameter(norm.weight.detach().index_select(0, kept.to(norm.weight.device)), requires_grad=False)
    return made


def fits(path: str, node: Any) -> None:
    """Refuse, by name, a linear map whose format cannot hold its shape."""
    try:
        node.format.build().layout((node.out_dim, node.in_dim))
    except ConfigError as error:
        hint = "keep a multiple of the format's group: multiple=64"
        raise UnsupportedPair(f"{path}, {node.out_dim} × {node.in_dim}: {error.message}", hint=hint) from error


def _module(path: str) -> str:
    return path.replace("[", ".").replace("]", "")
