"""Taking whole experts out of a built decoder: their weights, and the rows of the router that lead to them.

The router's softmax is then over those that are left, so their weights grow; a router that makes the chosen weights sum to one
goes on doing so. A packed expert leaves with its codes and nothing is rounded anew. The router's own map, where it is packed, is
unpacked, cut and packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.linear import GroupedLinear
from orchard.nn.moe import MoE, TopK
from orchard.nn.tensors import carried
from orchard.transforms.lora_twin import dotted, replaced
from orchard.transforms.prune_cut import cut_linear

M = TypeVar("M", bound=nn.Module)
PARTS = ("gate", "up", "down")


def mixtures(tree: Any) -> dict[str, Any]:
    """The mixtures whose experts can go, by module path. One that does not choose experts token by token is refused by name."""
    found: dict[str, Any] = {}
    for path, node in tree.find(MoE):
        if not isinstance(node.router, TopK.Config):
            raise UnsupportedPair(
                f"{path} has a router of another kind ({type(node.router).__qualname__.partition('.')[0]})",
                hint="experts can go where each token chooses its own",
            )
        found[path.replace("[", ".").replace("]", "")] = node
    if not found:
        raise UnsupportedPair("the model has no mixture of experts", hint="`prune` takes hidden units out of others")
    return found


def with_fewer(tree: Any, counts: Mapping[str, int]) -> Any:
    """The tree with so many experts in the mixtures at these module paths."""
    tree = tree.clone()
    for path, count in counts.items():
        node = tree.get(dotted(path))
        enough(path, node, count)
        node.experts = count
    return tree.complete()


def enough(path: str, node: Any, count: int) -> None:
    """Refuse to leave a mixture fewer experts than each of its tokens asks."""
    if count < node.router.k:
        raise ConfigError(
            f"{path} would keep {count} of {node.experts} experts, and each token asks {node.router.k}",
            hint=f"keep at least {node.router.k / node.experts:.3g} of them",
        )
    if count > node.experts:
        raise ConfigError(f"{path} cannot keep {count} experts", hint=f"it has {node.experts}")


def cut_experts(model: M, kept: Mapping[str, Tensor]) -> M:
    """A new model with only these experts, in this order, by the module path of their mixture."""
    tree: Any = model.config
    tree = tree.complete()
    known = mixtures(tree)
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path, stay in kept.items():
        if path not in known:
            raise ConfigError(f"no mixture is called {path!r}", hint="as in " + next(iter(known)))
        _refuse(path, known[path], stay)
        makers[f"{path}.router.gate"] = partial(cut_linear, f"{path}.router.gate", rows=stay)
        makers |= {f"{path}.{name}": partial(_cut_grouped, f"{path}.{name}", kept=stay) for name in PARTS}
    smaller = with_fewer(tree, {path: len(stay) for path, stay in kept.items()})
    made: M = carried(replaced(model, makers) if makers else model, smaller)
    return made


def _refuse(path: str, node: Any, kept: Tensor) -> None:
    numbers = kept.tolist()
    if len(set(numbers)) < len(numbers) or not all(0 <= number < node.experts for number in numbers):
        raise ConfigError(f"{path} cannot keep the experts {numbers}", hint=f"each once, from 0 to {node.experts - 1}")


def _cut_grouped(path: str, linear: nn.Module, kept: Tensor) -> nn.Module:
    if type(linear) is not GroupedLinear:
        raise UnsupportedPair(f"{path} is a {type(linear).__name__}, which cannot be cut", hint="prune before that")
    with torch.device("meta"):
        made: GroupedLinear = linear.config.clone(count=len(kept)).build()
    made._place({name: part.detach()[kept.to(part.device)] for name, part in linear.packed().items()})
    return made
