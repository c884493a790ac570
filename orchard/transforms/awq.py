"""Activation-aware rounding (AWQ, arXiv 2306.00978): channels with large inputs get larger weights, so that they are rounded
finer, and the norm or the linear map before them takes the scale back.

Where that is possible says `awq_folds`; elsewhere weights keep their columns, and `notes` say where. The scales of a fold are
(root mean square of each input)ᵃ, with the exponent a that leaves the least error in what the maps give on the texts. As in
the paper groups may cut off their largest values: which scale of a group is best is weighted by the inputs (`ptq_scales`).
Rounding to nearest without any of this is always among what is tried, so the error on the texts is never above that. The paper
uses mean magnitudes, and for attention the error of what the whole of it gives; here all follows from the maps' own H = XᵀX.

Layers go one after another: each sees what the quantised ones before it give. Experts are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.nn.formats import Format, Grouped
from orchard.nn.linear import Linear, Weight
from orchard.transforms.awq_folds import Fold, Tensors, folds_of
from orchard.transforms.base import M, Tell, _tree, silent
from orchard.transforms.hessians import Stream, dead_inputs, under
from orchard.transforms.ptq import Quantise, refuse_broken
from orchard.transforms.ptq_scales import either, half_scales, nearest_codes, spent, weighted_codes
from orchard.transforms.reformat import learning_like

LEAST = 1e-4
"""Scales lie between this and its inverse."""


@dataclass(frozen=True)
class Awq(Quantise):
    """The transform: `Awq(bits=4, group=64).apply(model, texts)`."""

    looks: ClassVar[bool] = True
    grid: int = 10
    """Exponents that are tried, from 0 to below 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.grid, bool) or not isinstance(self.grid, int) or self.grid < 1:
            raise ConfigError(f"a grid of {self.grid!r} exponents", hint="use a whole number from 1, such as 10")

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, notes = self.chosen(_tree(model))
        built = {path: half_scales(format.build()) for path, format in formats.items()}
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        made: Any = learning_like(self._in(model, self(_tree(model))), model)
        stream = Stream(made, texts, "Awq")
        source: Any = model
        layers = list(zip(source.stack.layers, made.stack.layers, strict=True))
        for number, (old, new) in enumerate(layers):
            path = f"stack.layers.{number}"
            self._layer(old, new, path, stream, {at: built[at] for at in under(path, built)})
            stream.go(new)
            tell(1 / len(layers))
        result: M = made
        return result

    def _layer(self, old: nn.Module, new: nn.Module, path: str, stream: Stream, formats: Mapping[str, Format]) -> None:
        """Round the linear maps of a layer and put them, with what takes their scales, into the new one."""
        inside = {at: old.get_submodule(at.removeprefix(f"{path}.")) for at in formats}
        linear: dict[str, Weight] = {at: module for at, module in inside.items() if isinstance(module, Linear)}
        self.notes.extend(f"{at}: experts are rounded to nearest" for at in inside if at not in linear)
        if not linear:
            return
        hessians = self._hessians(old, linear, stream)
        folds, notes = folds_of(old, path, linear, int(path.rpartition(".")[2]) in stream.shared)
        self.notes.extend(notes)
        tensors, columns = _dense(old, path), {}
        # Columns before rows: errors of different scales are compared while rows still have their own size.
        for fold in sorted(folds, key=lambda fold: fold.offset is None):
            scales = self._best(fold, tensors, hessians[fold.readers[0]], formats)
            fold.apply(tensors, scales)
            columns.update(dict.fromkeys(fold.readers, fold.spread(scales)))
        for at in linear:
            hessian = hessians[at]
            if (by := columns.get(at)) is not None:
                hessian = hessian / by[:, None] / by
            module = new.get_submodule(at.removeprefix(f"{path}."))
            assert isinstance(module, Weight)
            kept = module.assign_grouped(closest(tensors[f"{at}.weight"].float(), hessian, formats[at]))
            assert kept  # the format's own codes, or `half_scales` had refused it
        _put(new, path, tensors)

    def _hessians(self, layer: nn.Module, linear: Mapping[str, Weight], stream: Stream) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for stage in stream.stages(layer, linear):
            hessian = stream.inputs(layer, {at: linear[at] for at in stage})[stage[0]][0].hessian(", ".join(stage))
            if dead := dead_inputs(hessian):
                self.notes.append(f"{', '.join(stage)}: {dead} of {len(hessian)} inputs are always zero")
            found.update(dict.fromkeys(stage, hessian))
        return found

    def _best(self, fold: Fold, tensors: Tensors, hessian: Tensor, formats: Mapping[str, Format]) -> Tensor:
        """The scales [channels of the source] that leave the least error on the texts; ones where nothing beats rounding to
        nearest."""
        root = fold.gather(hessian.diagonal()).sqrt()
        weights = {reader: tensors[f"{reader}.weight"].float() for reader in fold.readers}
        best = torch.ones_like(root)
        least = sum(
            float(spent(nearest_codes(weight, formats[reader]).dense() - weight, hessian).sum())
            for reader, weight in weights.items()
        )
        for step in range(self.grid):
            scales = fold.exact(tensors, powers(root, step / self.grid))
            columns, error = fold.spread(scales), 0.0
            for reader, weight in weights.items():
                rounded = weighted_codes(weight * columns, hessian.diagonal() / columns.square(), formats[reader])
                error += float(spent(rounded.dense() / columns - weight, hessian).sum())
            if error < least:
                best, least = scales, error
        return best


def closest(weight: Tensor, hessian: Tensor, format: Format) -> Grouped:
    """A weight rounded to nearest, per row with the format's own scales or with those that inputs ask for: what is less off."""
    near, by_inputs = nearest_codes(weight, format), weighted_codes(weight, hessian.diagonal(), format)
    better = spent(by_inputs.dense() - weight, hessian) < spent(near.dense() - weight, hessian)
    return either(better, by_inputs, near)


def powers(root: Tensor, exponent: float) -> Tensor:
    """Scales from the size of inputs, around one; a channel that is always zero keeps its own."""
    live = root > 0
    if exponent == 0 or not live.any():
        return torch.ones_like(root)
    scales = root[live].pow(exponent)
    made = torch.ones_like(root)
    made[live] = (scales / (scales.max() * scales.min()).sqrt()).clamp(LEAST, 1 / LEAST)
    return made


def _dense(layer: nn.Module, path: str) -> Tensors:
    """Every dense tensor of a layer that a fold may touch."""
    tensors: Tensors = {}
    for name, module in layer.named_modules():
        if isinstance(module, Linear):
            tensors[f"{path}.{name}.weight"] = module.dense()
            if module.bias is not None:
                tensors[f"{path}.{name}.bias"] = module.bias.detach()
        elif not isinstance(module, Weight) and isinstance(weight := getattr(module, "weight", None), Tensor):
            tensors[f"{path}.{name}.weight"] = weight.detach()
    return tensors


def _put(layer: nn.Module, path: str, tensors: Tensors) -> None:
    """Norms and biases as they are now."""
    for name, module in layer.named_modules():
        parts = ("bias",) if isinstance(module, Weight) else ("weight",)
        for part in parts:
            tensor = tensors.get(f"{path}.{name}.{part}")
            if tensor is not None:
                setattr(module, part, nn.Parameter(tensor.clone(), requires_grad=False))
