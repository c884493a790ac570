"""How many multiplications and additions it takes to learn from a batch: the numerator of MFU (arXiv 2204.02311, appendix B).

Counted, for each token that is read (padding is not):
- 6 for each weight that the token is multiplied with: 2 forwards, 2 back to the input, 2 for the weight's own gradient;
- 4 for each frozen one, which needs no gradient of its own, and 6 for the side paths beside it;
- 12 · heads · head width · T for each attention layer. T is the length of the token's own document, or the layer's window. As in
  the paper this is not halved for causality, so figures can be compared with published ones;
- of a mixture of experts, the share of experts that a token meets.
Looking a token up in a table is no multiplication; a head that uses the same table the other way round is. Not counted: norms,
activations, what is computed twice to save memory, a teacher's or a reference's forward pass, and sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from torch import nn

from orchard.core.batch import Batch

TRAINED, FROZEN, ATTENTION = 6, 4, 12


@dataclass(frozen=True)
class Costs:
    """Of one model, by what they grow with."""

    weights: float
    """Operations for each token."""
    attention: tuple[tuple[float, int | None], ...] = ()
    """For each layer: operations for each token and each token of its document, and the layer's window."""

    def of(self, batch: Any) -> float:
        """Operations to learn from a batch, whatever rows it is made of."""
        total = 0.0
        for rows in rows_of(batch):
            positions = _array(rows.positions)
            # Over a document of n tokens, 2p + 1 adds up to n², which is n tokens times its length n.
            reach = 2.0 * positions[positions >= 0] + 1
            total += self.weights * len(reach)
            for window in {window for _, window in self.attention}:
                seen = float((reach if window is None else np.minimum(reach, window)).sum())
                total += seen * sum(cost for cost, of in self.attention if of == window)
        return total


def costs_of(model: nn.Module) -> Costs:
    """Before a model is split over processes: parts do not know the whole."""
    shares, tied = _shares(model), _tied(model)
    weights = sum(shares.get(id(module), 1.0) * _own(module, tied) for module in model.modules())
    return Costs(weights, tuple(_attention(model)))


def rows_of(batch: Any) -> Iterator[Batch]:
    """The batches of rows in a batch of any kind: pairs have two, groups one."""
    if isinstance(batch, Batch):
        yield batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        for item in fields(batch):
            yield from rows_of(getattr(batch, item.name))


def _own(module: nn.Module, tied: set[int]) -> float:
    """Operations of a module's own weights, without those of the modules in it."""
    if isinstance(module, nn.Embedding):
        return 0.0
    own = {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1}
    total = 0.0
    if _is_weight(module):  # in some format: what is multiplied is the matrix, however few numbers keep it
        packed = module.packed()  # type: ignore[operator]
        trained = any(name in own and own[name].requires_grad for name in packed)
        if not hasattr(module, "scores") or id(module) in tied:
            total += (TRAINED if trained else FROZEN) * math.prod(module.shape)  # type: ignore[arg-type]
        own = {name: parameter for name, parameter in own.items() if name not in packed}
    return total + sum(
        (TRAINED if parameter.requires_grad else FROZEN) * parameter.numel() for parameter in own.values()
    )


def _tied(model: nn.Module) -> set[int]:
    """Tables that are used as heads too."""
    owners = (module for module in model.modules() if getattr(module, "head", module) is None)
    return {id(table) for owner in owners if hasattr(table := getattr(owner, "embedding", None), "scores")}


def _shares(model: nn.Module) -> dict[int, float]:
    """Of grouped weights: how many of their experts a token meets."""
    shares: dict[int, float] = {}
    for module in model.modules():
        experts = getattr(getattr(module, "config", None), "experts", None)
        router = getattr(getattr(module, "router", None), "config", None)
        chosen = getattr(
            router, "k", getattr(router, "capacity", None)
        )  # experts that choose meet so many tokens on average
        if isinstance(experts, int) and isinstance(chosen, int | float) and experts > 0:
            shares |= {
                id(part): min(1.0, chosen / experts)
                for part in module.children()
                if _is_weight(part) and len(part.shape) == 3  # type: ignore[arg-type]
            }
    return shares


def _attention(model: nn.Module) -> Iterator[tuple[float, int | None]]:
    for module in model.modules():
        config = getattr(module, "config", None)
        heads, width = getattr(config, "heads", None), getattr(config, "head_dim", None)
        if isinstance(heads, int) and isinstance(width, int):
            yield float(ATTENTION * heads * width), getattr(config, "window", None)


def _is_weight(module: nn.Module) -> bool:
    """`orchard.nn.linear.Weight` by what it can do: this folder does not know that one."""
    return isinstance(getattr(module, "shape", None), tuple) and callable(getattr(module, "packed", None))


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
