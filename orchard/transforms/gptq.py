"""GPTQ (arXiv 2210.17323): weights rounded one column after another, each error made good for by the columns that come later.

A model goes layer by layer, and within a layer stage by stage (queries, keys and values; the way out; gate and up; down): what a
map is fitted to is what everything before it gives it once that is quantised. What happens to one weight is in `gptq_solve`.

Experts see only the tokens that are routed to them. One that saw fewer than it has inputs is rounded to nearest, and `notes`
name it. An embedding is looked up and has no inputs: it is rounded to nearest too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.nn.formats import Grouped
from orchard.nn.linear import Embedding, GroupedLinear, Weight
from orchard.transforms.base import M, Tell, _tree, silent
from orchard.transforms.gptq_solve import Curvature, solve
from orchard.transforms.hessians import Inputs, Stream, dead_inputs, under
from orchard.transforms.ptq import Quantise, refuse_broken
from orchard.transforms.ptq_scales import half_scales, nearest_codes
from orchard.transforms.reformat import learning_like


@dataclass(frozen=True)
class Gptq(Quantise):
    """The transform: `Gptq(bits=4, group=64).apply(model, texts)`; a few thousand tokens are enough for small models."""

    looks: ClassVar[bool] = True
    damp: float = 0.01
    """Share of the mean diagonal that is added to H: more trusts the texts less."""
    order: bool = True
    """Round columns with large inputs first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.damp) and self.damp >= 0):
            raise ConfigError(f"damp is {self.damp!r}", hint="use a small number from 0, such as 0.01")

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, notes = self.chosen(_tree(model))
        for format in {repr(format): format for format in formats.values()}.values():
            half_scales(format.build())
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        made: Any = learning_like(self._in(model, self(_tree(model))), model)
        stream = Stream(made, texts, "Gptq")
        weights: dict[str, Weight] = {path: made.get_submodule(path) for path in formats}
        old: dict[str, Any] = {path: model.get_submodule(path) for path in formats}
        layers = made.stack.layers
        for number, layer in enumerate(layers):
            inside = {path: weights[path] for path in under(f"stack.layers.{number}", weights)}
            for stage in stream.stages(layer, inside) if inside else []:
                inputs = stream.inputs(layer, {path: weights[path] for path in stage})
                self._round(stage, inputs, weights, old)
            stream.go(layer)
            tell(1 / (len(layers) + 1))
        self._last(made, stream, weights, old)
        tell(1 / (len(layers) + 1))
        result: M = made
        return result

    def _round(
        self,
        paths: list[str],
        inputs: Mapping[str, list[Inputs]],
        weights: Mapping[str, Weight],
        old: Mapping[str, Any],
    ) -> None:
        """Maps that read the same."""
        if isinstance(weights[paths[0]], GroupedLinear):
            for path in paths:
                weights[path].assign_grouped(self._experts(path, inputs[path], weights[path], old[path].dense()))
            return
        shared = inputs[paths[0]][0]
        curvature = self._curvature(", ".join(paths), shared)
        if shared.count < len(curvature.hessian):
            told = f"{shared.count:,} inputs for {len(curvature.hessian):,} channels are few"
            self.notes.append(f"{', '.join(paths)}: {told}")
        for path in paths:
            kept = weights[path].assign_grouped(solve(old[path].dense(), curvature, weights[path].format))
            assert kept  # the format's own codes, or `half_scales` had refused it

    def _experts(self, path: str, inputs: list[Inputs], weight: Weight, dense: Tensor) -> Grouped:
        made = []
        for expert, seen in enumerate(inputs):
            width = dense.shape[-1]
            if seen.count < width:
                self.notes.append(
                    f"{path}: expert {expert} saw {seen.count:,} of the {width:,} inputs it needs; rounded to nearest"
                )
                made.append(nearest_codes(dense[expert], weight.format))
            else:
                curvature = self._curvature(f"{path} (expert {expert})", seen)
                made.append(solve(dense[expert], curvature, weight.format))
        lows = [one.minima for one in made if one.minima is not None]
        codes, scales = torch.stack([one.codes for one in made]), torch.stack([one.scales for one in made])
        return Grouped(codes, scales, torch.stack(lows) if lows else None, made[0].bits, made[0].group)

    def _curvature(self, path: str, inputs: Inputs) -> Curvature:
        hessian = inputs.hessian(path)
        if dead := dead_inputs(hessian):
            self.notes.append(f"{path}: {dead} of {len(hessian)} inputs are always zero; rounded to nearest there")
        return Curvature.of(hessian, damp=self.damp, order=self.order)

    def _last(self, made: Any, stream: Stream, weights: Mapping[str, Weight], old: Mapping[str, Any]) -> None:
        """What lies outside the layers."""
        for path, module in weights.items():
            if isinstance(module, Embedding):
                self.notes.append(f"{path}: an embedding is looked up and has no inputs; rounded to nearest")
        if "head" in weights:
            inputs = Inputs(weights["head"].shape[-1], made.device)
            with torch.no_grad():
                for state, context in zip(stream.states, stream.contexts, strict=True):
                    inputs.add(made.norm(state)[context.positions >= 0])
            self._round(["head"], {"head": [inputs]}, weights, old)
