"""Side paths into weights and out of them again.

`merged` gives a model without side paths that does the same; `unmerged` takes such a model back to what it was before, up to the
rounding of one sum per weight; `merged_in` switches a model over for a while and leaves it with the same bits.

What DoRA merges cannot be taken back by its adapter alone. A row of the merged weight is m · (w + d) / ‖w + d‖, with d the row of
scale · B A and m its trained length: every w = n · row / m - d, for any n > 0, gives that very row. The n that was lost is the
length of w + d, one number for each row (`lengths_of`): who keeps those beside the merged weights can go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Plain
from orchard.nn.linear import Linear
from orchard.transforms.lora_kept import KeptLinear
from orchard.transforms.lora_linear import LoraLinear
from orchard.transforms.lora_sides import Side, found_in
from orchard.transforms.lora_twin import replaced, twin

M = TypeVar("M", bound=nn.Module)


def merged(model: M, *, own: bool = True) -> M:
    """A twin without side paths that does the same; only the weights beside one are new tensors. Without `own`, side paths that
    belong to the model itself (`kept`) stay beside its weights: adapters alone are merged."""
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and (own or not module.config.kept):
            makers[path] = _merge_all if own else LoraLinear.merge
        elif own and isinstance(module, KeptLinear):
            makers[path] = KeptLinear.merge
    return replaced(model, makers)


def lengths_of(model: nn.Module) -> dict[str, np.ndarray]:
    """The lengths of adapted rows before DoRA gave them others, by module path: what `unmerged` needs to go back."""
    return {path: module.lengths().cpu().numpy() for path, module in found_in(model) if module.config.dora}


def unmerged(
    model: M,
    sides: Mapping[str, Side],
    magnitudes: Mapping[str, Any] | None = None,
    lengths: Mapping[str, Any] | None = None,
) -> M:
    """A twin of a merged model with its side paths taken out again: W - scale · B A, for dense weights.

    `magnitudes` are those of a DoRA adapter, `lengths` what `lengths_of` said before it was merged; `UnsupportedPair` where they
    are missing, or where a row cannot be brought back.
    """
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path, side in sides.items():
        makers[path] = _taker(path, side, (magnitudes or {}).get(path), (lengths or {}).get(path))
    return replaced(model, makers)


@contextmanager
def merged_in(model: M) -> Iterator[M]:
    """Inside, every weight beside a side path holds it, and the side paths cost nothing; afterwards every weight is the very
    tensor it was. Dense weights only. Nothing trains through the merged ones."""
    found = [module for _, module in found_in(model)]
    weights = [module.merged_weight() for module in found]  # all of them before any is put in place
    kept: list[tuple[LoraLinear, nn.Parameter | None]] = []
    try:
        for module, weight in zip(found, weights, strict=True):
            kept.append((module, module._parameters["weight"]))
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            module.switched_in = True
        yield model
    finally:
        for module, parameter in kept:
            module._parameters["weight"], module.switched_in = parameter, False


# Inside ---------------------------------------------------------------------------------------------------------------


def _merge_all(linear: LoraLinear) -> nn.Module:
    made = linear.merge()
    return made.merge() if isinstance(made, KeptLinear) else made


def _taker(path: str, side: Side, magnitude: Any, length: Any) -> Callable[[Any], nn.Module]:
    def make(linear: Any) -> nn.Module:
        alone = type(linear) in (Linear, KeptLinear)
        if not alone or not isinstance(linear.format, Plain):
            what = type(linear.format).__name__ if alone else type(linear).__name__
            raise UnsupportedPair(
                f"{path} is a {what}: side paths come out of dense weights only", hint="load it with dtype='float32'"
            )
        weight = linear.dense(torch.float32).detach()
        a, b = (torch.as_tensor(part).detach().to(weight) for part in side[:2])
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != linear.shape or b.shape[1] != a.shape[0]:
            raise ConfigError(
                f"{path}: a side path of {tuple(a.shape)} and {tuple(b.shape)} beside {linear.shape}",
                hint="A is [rank, in] and B is [out, rank]",
            )
        if magnitude is not None:
            weight = weight * _back(path, magnitude, length, weight)[:, None]
        made = twin(linear)
        made.assign((weight - side[2] * (b @ a)).to(linear._first().dtype))
        return made

    return make


def _back(path: str, magnitude: Any, length: Any, weight: Tensor) -> Tensor:
    """What undoes DoRA's gain."""
    if length is None:
        raise UnsupportedPair(
            f"{path}: DoRA gave its rows other lengths, and merged weights do not say which they had",
            hint="keep lengths_of(model) when merging, or go back to the base model's own file",
        )
    size, before = (torch.as_tensor(part).detach().to(weight) for part in (magnitude, length))
    if size.shape != weight.shape[:1] or before.shape != weight.shape[:1]:
        problem = f"{path}: {tuple(size.shape)} and {tuple(before.shape)} lengths for {weight.shape[0]} rows"
        raise ConfigError(problem, hint="make them equal")
    lost = (size == 0).nonzero()
    if len(lost):
        raise UnsupportedPair(
            f"{path}: DoRA gave row {int(lost[0])} a length of zero, and nothing is left of it",
            hint="go back to the base model's own file",
        )
    return before / size
