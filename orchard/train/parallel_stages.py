"""A model cut into stages of consecutive layers: where to cut, and how a process keeps one of them.

The first stage has the embedding, the last the norm and the head. A process keeps its own parts under their own names; where the
others were, something without parameters stands that hands on what it gets. So `model.hidden(x, context)` is the stage: ids or
hidden vectors in, hidden vectors out, and optimisers, norms, shards and checkpoints see a model with fewer parameters.

A model without a head of its own (tied) has its embedding on both ends: the first stage looks rows up, the last scores with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.blocks import layers_of
from orchard.core.errors import ConfigError, UnsupportedPair

PARTS = ("embedding", "stack", "norm", "head")
EDGE = "use a pipeline with fewer stages, or move its edges with mesh.cuts"


def plan_stages(model: nn.Module, count: int, cuts: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage, or why there cannot be so many; nothing is changed. `cuts`: the first layer of every stage but
    the first; None: so that the largest stage is as small as it can be, in bytes of weights. The head counts, and so does a
    table that is used as one; looking rows up costs nothing."""
    _refuse_unknown(model)
    whole: Any = model
    layers = layers_of(model)
    if count > len(layers):
        raise ConfigError(
            f"mesh.pipeline is {count}, and the model has {len(layers)} layers",
            hint=f"use at most {len(layers)} stages, and mesh.data or mesh.tensor for the other processes",
        )
    reads = _owners(layers)
    if cuts is None:
        end = whole.embedding if whole.head is None else whole.head
        sizes = [_bytes(layer) for layer in layers]
        found = _balanced(sizes, count, end=_bytes(end), together=reads.keys())
        if found is None:
            layer, owner = next(iter(reads.values()))
            raise UnsupportedPair(
                f"mesh.pipeline is {count}, and there are only {len(layers) - 1 - len(reads)} places to cut: layers that read "
                f"another layer's keys (such as {layer}, of {owner}) have to be on its stage",
                hint="use fewer stages",
            )
        cuts = found
    _refuse_cuts(cuts, count, len(layers), reads)
    edges = [0, *cuts, len(layers)]
    stages = [range(start, stop) for start, stop in pairwise(edges)]
    _refuse_parameters(model, stages)
    return stages


def keep_stage(model: nn.Module, stages: Sequence[range], stage: int, *, dtype: torch.dtype | None = None) -> None:
    """Leave in a model what belongs to one stage, in place. `dtype`: what layers compute in, where that is not the dtype of the
    parameters."""
    whole: Any = model
    first, last = stage == 0, stage == len(stages) - 1
    weight = whole.norm.weight
    for number in range(len(whole.stack.layers)):
        if number not in stages[stage]:
            whole.stack.layers[number] = Onward()
    if not first and last and whole.head is None:
        whole.embedding.forward = MethodType(_entered, whole.embedding)
    elif not first:
        whole.embedding = Entry()
    if not last:
        onward: Any = Onward()
        onward.weight = torch.empty(
            0, dtype=dtype or weight.dtype, device=weight.device
        )  # a decoder asks it for its dtype
        whole.norm = onward
        whole.head = None if whole.head is None else Closed()
    whole._layers_kept = stages[stage]


def layers_kept(model: nn.Module) -> range | None:
    """The layers of the one stage that a model was cut down to; None: it is whole."""
    kept: range | None = model.__dict__.get("_layers_kept")
    return kept


class Onward(nn.Module):
    """Where a layer or a norm was that another stage has."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class Entry(nn.Module):
    """Where the embedding was: what comes in are hidden vectors of the stage before."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _entered(self, x, dtype)


class Closed(nn.Module):
    """Where the head was."""

    def forward(self, x: Tensor) -> Tensor:
        raise _only_a_stage("scores are made on the last one")


def _entered(self: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        raise _only_a_stage("token ids are read on the first one")
    return x


def _only_a_stage(why: str) -> UnsupportedPair:
    return UnsupportedPair(
        f"this model is one stage of a pipeline, and {why}",
        hint="read it through Pipeline.loss; a teacher or a reference has to be a model of its own, not this one without its "
        "side paths",
    )


# Where to cut -------------------------------------------------------------------------------------------------------------


def _balanced(sizes: Sequence[int], count: int, *, end: int, together: Collection[int]) -> list[int] | None:
    """The cuts for which the largest sum is smallest. `end` is added to the last stage; there is no cut before `together`."""
    until = [0, *accumulate(sizes)]
    total = len(sizes)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers that are dealt out → the largest stage, its cuts
    for stage in range(count):
        found: dict[int, tuple[float, list[int]]] = {}
        for stop in [total] if stage == count - 1 else range(stage + 1, total):
            if stop in together and stop < total:
                continue
            for start, (largest, cuts) in best.items():
                if start < stop:
                    size = max(largest, until[stop] - until[start] + (end if stop == total else 0))
                    if stop not in found or size < found[stop][0]:
                        found[stop] = (size, [*cuts, stop])
        best = found
    return best[total][1][:-1] if total in best else None


def _owners(layers: Sequence[nn.Module]) -> dict[int, tuple[int, int]]:
    """Layers before which there can be no cut, each with a layer that reads keys of an earlier one, and that one."""
    found: dict[int, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        mixer = getattr(getattr(layer, "mixer", None), "config", None)
        owner = getattr(getattr(mixer, "store", None), "owner", None)
        borrow = getattr(mixer, "borrow", None)
        if borrow is not None:
            owner = min(borrow.layers)
        if owner is not None:
            for between in range(owner + 1, number + 1):
                found.setdefault(between, (number, owner))
    return found


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


# What cannot be cut -------------------------------------------------------------------------------------------------------


def _refuse_unknown(model: nn.Module) -> None:
    missing = [name for name in PARTS if not hasattr(model, name)]
    known = ("embedding.", "stack.layers.", "norm.", "head.")
    other = [name for name, _ in model.named_parameters() if not name.startswith(known)]
    if missing or other or not layers_of(model):
        what = f"no {missing[0]}" if missing else other[0] if other else "no list of layers"
        raise UnsupportedPair(
            f"mesh.pipeline cuts decoders (embedding, stack of layers, norm, head), and a {type(model).__name__} has {what}",
            hint="use mesh.data or mesh.tensor for this model",
        )


def _refuse_cuts(cuts: Sequence[int], count: int, layers: int, reads: dict[int, tuple[int, int]]) -> None:
    if len(cuts) != count - 1 or list(cuts) != sorted(set(cuts)) or not all(0 < cut < layers for cut in cuts):
        raise ConfigError(
            f"mesh.cuts is {list(cuts)}, for {count} stages of {layers} layers",
            hint=f"name the first layer of each stage but the first: {count - 1} rising numbers from 1 to {layers - 1}",
        )
    for cut in cuts:
        if cut in reads:
            layer, owner = reads[cut]
            raise UnsupportedPair(
                f"mesh.cuts has a cut before layer {cut}, and layer {layer} reads the keys of layer {owner}",
                hint="cut elsewhere: both have to be on one stage",
            )


def _refuse_parameters(model: nn.Module, stages: Sequence[range]) -> None:
    """Every stage needs something to train, because optimisers do; no parameter may be on two of them under two names."""
    places: dict[int, tuple[str, int]] = {}
    trained = [0] * len(stages)
    tied = model.head is None
    for name, parameter in model.named_parameters(remove_duplicate=False):
        at = _stage_of(name, stages)
        other, before = places.setdefault(id(parameter), (name, at))
        if before != at:
            raise UnsupportedPair(
                f"{other} and {name} are the same tensor, which stages {before} and {at} of the pipeline would take apart",
                hint="tie a head by leaving it out (head=None), or use mesh.data",
            )
        trained[at] += parameter.requires_grad
        if tied and name.startswith("embedding."):
            trained[-1] += parameter.requires_grad
    for stage, count in enumerate(trained):
        if not count:
            layers = stages[stage]
            raise UnsupportedPair(
                f"stage {stage} of the pipeline (layers {layers.start} to {layers.stop - 1}) has nothing that is trained",
                hint=EDGE,
            )


def _stage_of(name: str, stages: Sequence[range]) -> int:
    if name.startswith("stack.layers."):
        return next(stage for stage, layers in enumerate(stages) if int(name.split(".")[2]) in layers)
    return 0 if name.startswith("embedding.") else len(stages) - 1
