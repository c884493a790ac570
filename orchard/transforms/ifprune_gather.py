"""A choice as an ordinary decoder: the rows of gate and up and the columns of down that it keeps, and nothing else.

How much a group counts (λ) goes into the columns of down, where it costs nothing. The result has narrower MLPs and no masks: any
format packs it, the native engine runs it, and it gives what the masked model does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.errors import UsageError
from orchard.nn.mlp import GatedMLP
from orchard.nn.tensors import carried, dense_tensor, fill
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_mlp import SubnetMLP
from orchard.transforms.prune_cut import cut


def choosing(decoder: nn.Module) -> dict[str, SubnetMLP]:
    """The layers of a decoder that choose, by path, in order."""
    found = {path: part for path, part in decoder.named_modules() if isinstance(part, SubnetMLP)}
    return dict(sorted(found.items(), key=lambda item: item[1].config.place))


def plain(decoder: nn.Module) -> Any:
    """The same decoder with all its units, as an ordinary one."""
    tree: Any = decoder.config
    for path, node in tree.complete().find(SubnetMLP):
        tree = tree.set(path, node.derive(GatedMLP))
    return carried(decoder, tree)


def gathered(decoder: nn.Module, choice: Choice) -> Any:
    """An ordinary decoder of the units that a choice keeps. The one given is not changed, and nothing is shared with it."""
    layers = choosing(decoder)
    if len(layers) != choice.layers or any(part.config.groups != choice.of for part in layers.values()):
        raise UsageError(
            f"a choice of {choice.layers} × {choice.of} groups is not for this model", hint="use one that it made itself"
        )
    whole, units = plain(decoder), {}
    for (path, part), groups, weights in zip(layers.items(), choice.groups(), choice.weights, strict=True):
        units[path] = part.units_of(torch.tensor(groups))
        _scale(whole.get_submodule(path).down, f"{path}.down", part.spread(weights))
    return cut(whole, units, {})


def picked(decoder: nn.Module, choice: Choice) -> Any:
    """The same for a decoder with ordinary MLPs, whose hidden units are as many equal groups as the choice says."""
    paths = [path for path, part in decoder.named_modules() if isinstance(part, GatedMLP)]
    if len(paths) != choice.layers:
        raise UsageError(f"a choice of {choice.layers} layers for a model of {len(paths)}", hint="use one that it made")
    whole, units = decoder, {}
    for path, groups, weights in zip(paths, choice.groups(), choice.weights, strict=True):
        width = decoder.get_submodule(path).config.hidden_dim  # type: ignore[union-attr]
        if width % choice.of:
            raise UsageError(f"{path} has {width} units, which are not {choice.of} groups", hint="use one that it made")
        size = width // choice.of
        units[path] = (torch.tensor(groups)[:, None] * size + torch.arange(size)).flatten()
        if choice.temperature is not None:
            whole = carried(decoder, decoder.config) if whole is decoder else whole  # type: ignore[arg-type]
            _scale(whole.get_submodule(path).down, f"{path}.down", weights.repeat_interleave(size))  # type: ignore[arg-type]
    return cut(whole, units, {})


def active(decoder: nn.Module, budget: int) -> tuple[int, int]:
    """Weights of the feed-forward layers that a budget uses, and all that there are."""
    used = total = 0
    for part in choosing(decoder).values():
        cfg = part.config
        used += 3 * cfg.dim * (cfg.shared + budget * cfg.size)
        total += 3 * cfg.dim * cfg.hidden_dim
    return used, total


def _scale(linear: nn.Module, path: str, columns: Tensor) -> None:
    weight = dense_tensor(linear, "weight").detach()
    scaled = weight * columns.to(weight)
    fill(linear, "weight", f"{path}.weight", scaled, weight.dtype, weight.device)
