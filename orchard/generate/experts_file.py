"""The experts of a plan as a file of records, and the plan without them.

A record is one expert: gate, up and down as the native kernels read them, in whatever format they are packed. What is read from
the file is what the engine computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orchard.cache.experts import Records, Source, write_records
from orchard.cache.experts.layout import Facts
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.ops.kernels.packing import matrix_bytes
from orchard.ops.plan.steps import Experts, Plan

ARRAYS = ("gate", "up", "down")


def expert_steps(plan: Plan) -> list[Experts]:
    return [step for step in plan.steps if isinstance(step, Experts)]


def write_experts(path: Path, plan: Plan, facts: Facts) -> None:
    """Write the experts of all layers; one is in memory at a time beside the plan."""
    layers = expert_steps(plan)
    if not layers:
        raise UsageError("this model has no experts", hint="load it without experts_budget")
    sources = [
        Source(f"layer {layer}", step.gate.count, partial(_expert, plan, step)) for layer, step in enumerate(layers)
    ]
    write_records(path, sources, facts)


def without_experts(plan: Plan) -> Plan:
    """The same steps; the experts' matrices are only named."""
    names = {getattr(step, name).tensor for step in expert_steps(plan) for name in ARRAYS}
    kept = {name: tensor for name, tensor in plan.tensors.items() if name not in names}
    return replace(plan, tensors=kept, elsewhere={name: plan.tensors[name].nbytes for name in sorted(names)})


def _expert(plan: Plan, step: Experts, expert: int) -> dict[str, np.ndarray]:
    sizes = _expert_bytes(step)
    tensors = {name: plan.tensors[getattr(step, name).tensor] for name in ARRAYS}
    return {name: tensor[expert * sizes[name] : (expert + 1) * sizes[name]].copy() for name, tensor in tensors.items()}


def check_records(records: Records, layers: Sequence[Experts]) -> None:
    """Hold a file of records against the layers that are to be run from it: native code trusts its sizes."""
    fits = len(records.layers) == len(layers) and all(
        known.units == step.gate.count and _sizes(known) == _expert_bytes(step)
        for known, step in zip(records.layers, layers, strict=False)
    )
    if not fits or not layers:
        raise UnsupportedPair(
            f"{records.path.name} does not hold the experts of this model", hint="make the file again from its model"
        )


def _sizes(layer: Any) -> dict[str, int]:
    return {name: array.nbytes for name, array in layer.arrays.items() if array.kind == "U8"}


def _expert_bytes(step: Experts) -> dict[str, int]:
    matrices = {name: getattr(step, name) for name in ARRAYS}
    return {name: matrix_bytes(m.kind, m.rows, m.cols, m.group, m.minimum) for name, m in matrices.items()}
