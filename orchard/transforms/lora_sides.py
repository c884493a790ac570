"""Trained side paths onto built models and off them again: what an adapter's file holds, by the paths of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.linear import Linear
from orchard.transforms.lora_kept import KeptLinear, LoraOver, beside, refuse_dora
from orchard.transforms.lora_linear import TRAINED, LoraLinear
from orchard.transforms.lora_twin import replaced, twin

M = TypeVar("M", bound=nn.Module)
Side = tuple[Any, Any, float]
"""A [rank, in], B [out, rank] (tensors or arrays), scale."""


def with_sides(
    model: M,
    sides: Mapping[str, Sequence[Side]],
    biases: Mapping[str, Sequence[Any]] | None = None,
    magnitudes: Mapping[str, Any] | None = None,
) -> M:
    """A twin of a built model with trained side paths, by module path; those of one module are joined into one. Side paths that
    belong to the model itself (`kept`) stay what they are.

    It shares every tensor with the model, which is not changed. `biases` stand in place of a module's own; of several, each
    counts by how far it is from that. `magnitudes` are DoRA's, of modules with one side path: the lengths of several do not add.
    """
    without = sorted(set(magnitudes or ()) - {path for path, found in sides.items() if found})
    if without:
        raise ConfigError(f"{without[0]}: lengths of rows without a side path", hint="give its A and B too")
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path in {*sides, *(biases or {})}:
        makers[path] = _maker(path, sides.get(path, ()), (biases or {}).get(path, ()), (magnitudes or {}).get(path))
    return replaced(model, makers)


def sides_of(model: nn.Module) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """The side paths of a model, by module path, as float32 arrays: what an adapter's file holds. Those that belong to the model
    itself (`kept`) are not among them."""
    found = [(path, module) for path, module in found_in(model) if not module.config.kept]
    return {path: (_array(module.lora_a), _array(module.lora_b), module.scale) for path, module in found}


def magnitudes_of(model: nn.Module) -> dict[str, np.ndarray]:
    """DoRA's lengths of rows, by module path: what stands beside A and B in an adapter's file."""
    return {path: _array(module.lora_magnitude) for path, module in found_in(model) if module.config.dora}


def freeze_base(model: nn.Module) -> list[nn.Parameter]:
    """Train the side paths and nothing else; the parameters to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in TRAINED)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def found_in(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    """The linear maps with a side path."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, LoraLinear)]


# Inside ---------------------------------------------------------------------------------------------------------------


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array


def _maker(
    path: str, sides: Sequence[Side], biases: Sequence[Any], magnitude: Any = None
) -> Callable[[Any], nn.Module]:
    def make(linear: Any) -> nn.Module:
        if type(linear) not in (Linear, LoraLinear, KeptLinear, LoraOver):
            raise UnsupportedPair(f"{path} is a {type(linear).__name__}, which takes no side path", hint="adapt others")
        joins = isinstance(linear, LoraLinear) and not linear.config.kept  # what belongs to the model stays apart
        own = [(linear.lora_a, linear.lora_b, linear.scale)] if joins else []
        if magnitude is not None and not joins:
            refuse_dora(linear)
        dora = magnitude is not None or (bool(own) and linear.config.dora)
        if sides and dora and len(sides) + len(own) > 1:
            raise UnsupportedPair(
                f"{path} has several side paths, and one is DoRA's", hint="apply a DoRA adapter alone"
            )
        made = _joined(path, linear.without() if joins else linear, [*sides, *own]) if sides else twin(linear)
        if magnitude is not None:
            made.set_magnitude(_lengths(path, magnitude, linear))
        if biases:
            before = torch.zeros(linear.shape[0]) if linear.bias is None else linear.bias.detach()
            away = sum(torch.as_tensor(bias).to(before) - before for bias in biases)
            made.bias = nn.Parameter(before + away, requires_grad=False)
        return made

    return make


def _joined(path: str, linear: Linear, sides: Sequence[Side]) -> LoraLinear:
    """Ranks one after another. One side path keeps its scale; several have theirs multiplied into B."""
    device = linear._first().device
    pairs = [(_floats(a, device), _floats(b, device), scale) for a, b, scale in sides]
    out_dim, in_dim = linear.shape
    for a, b, _ in pairs:
        if a.ndim != 2 or b.ndim != 2 or a.shape != (len(a), in_dim) or b.shape != (out_dim, len(a)) or not len(a):
            raise ConfigError(
                f"{path}: a side path of {tuple(a.shape)} and {tuple(b.shape)} beside {linear.shape}",
                hint="A is [rank, in] and B is [out, rank]",
            )
    rank = sum(len(a) for a, _, _ in pairs)
    scale = pairs[0][2] if len(pairs) == 1 else 1.0
    made = beside(linear, r=rank, alpha=scale * rank)
    made.lora_a = nn.Parameter(torch.cat([a for a, _, _ in pairs]), requires_grad=False)
    bs = [b if len(pairs) == 1 else b * each for _, b, each in pairs]
    made.lora_b = nn.Parameter(torch.cat(bs, dim=1), requires_grad=False)
    return made


def _lengths(path: str, magnitude: Any, linear: Linear) -> Tensor:
    lengths = _floats(magnitude, linear._first().device)
    if lengths.shape != linear.shape[:1]:
        problem = f"{path}: lengths of shape {tuple(lengths.shape)} for {linear.shape[0]} rows"
        raise ConfigError(problem, hint="make them equal")
    return lengths


def _floats(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value).detach().to(device=device, dtype=torch.float32)
