"""A plan with fewer hidden units in its gated MLPs: blocks of packed bytes are picked out, nothing is unpacked.

Packed rows lie in blocks of 32, and columns in groups of a format's own: whole groups of units, each as long as both (`unit_of`), can
be taken out of gate, up and down as they are. Every other tensor is shared with the plan, so that a sub-network costs the memory
of its own units. A factor on a group goes into the scales (or values) of its rows of `up`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from orchard.core.errors import UnsupportedPair, UsageError
from orchard.ops.kernels.packing import BITS, BLOCK, PALETTES, from_bfloat, matrix_bytes, room, to_bfloat
from orchard.ops.plan.check import check
from orchard.ops.plan.steps import Gated, Linear, Matrix, Plan, Step

KINDS = ("f32", "bf16", *BITS, *PALETTES)
_TABLES = 64
"""Bytes of a palette block's tables."""


def gated_mlps(plan: Plan) -> dict[str, tuple[int, int]]:
    """The MLPs of a plan whose units can be taken: path → where its two steps are."""
    found: dict[str, tuple[int, int]] = {}
    for at, step in enumerate(plan.steps):
        if isinstance(step, Gated):
            path = step.gate.tensor.removesuffix(".weight").removesuffix(".gate")
            down = next((i for i in range(at + 1, len(plan.steps)) if getattr(plan.steps[i], "src", None) == step.to), None)
            after = plan.steps[down] if down is not None else None
            if down is not None and isinstance(after, Linear) and len(after.outputs) == 1 and after.norm is None:
                matrices = (step.gate, step.up, after.outputs[0].matrix)
                if all(matrix.kind in KINDS and matrix.count == 1 for matrix in matrices):
                    found[path] = (at, down)
    return found


def unit_of(plan: Plan, path: str) -> int:
    """The smallest number of neighbouring hidden units of an MLP that can be taken by themselves."""
    at, down = _steps_of(plan, path)
    size = math.lcm(BLOCK, _step_of(_down(plan, down)))
    gated = plan.steps[at]
    assert isinstance(gated, Gated)
    if gated.gate.rows % size:
        raise UnsupportedPair(f"{path} has {gated.gate.rows} units, no multiple of {size}", hint="choose in torch")
    return size


def subset(plan: Plan, kept: Mapping[str, Sequence[int]], factors: Mapping[str, Sequence[float]] | None = None) -> Plan:
    """The plan with only these groups (of `unit_of` units each) of some MLPs, in rising order; `factors`: how much each counts."""
    steps, tensors, widths = list(plan.steps), dict(plan.tensors), list(plan.widths)
    narrowed = {at for path in kept for at in _steps_of(plan, path)[:1]}
    # A buffer that only these MLPs write to is theirs to narrow; it would otherwise be one that nobody writes.
    spare = {plan.steps[at].to for at in narrowed} - {  # type: ignore[attr-defined]
        buffer for at, step in enumerate(plan.steps) if at not in narrowed for buffer in _writes(step)
    }
    rooms: dict[int, int] = {}
    for path, groups in kept.items():
        size, (at, below) = unit_of(plan, path), _steps_of(plan, path)
        gated, down = steps[at], steps[below]
        assert isinstance(gated, Gated) and isinstance(down, Linear)
        count = gated.gate.rows // size
        if not groups or list(groups) != sorted(set(groups)) or groups[0] < 0 or groups[-1] >= count:
            raise UsageError(f"{path}: {list(groups)[:8]} are no groups of {count}", hint="name some, in rising order")
        blocks = _each(groups, size // BLOCK)
        width = len(groups) * size
        weighed = None if factors is None else np.repeat(np.asarray(factors[path], np.float32), size // BLOCK)
        buffer = rooms.get(width)
        if buffer is None:
            buffer = spare.pop() if spare else len(widths)
            rooms[width] = buffer
            widths[buffer : buffer + 1] = [width]
        out = down.outputs[0]
        tensors[gated.gate.tensor] = _rows(plan, gated.gate, blocks)
        tensors[gated.up.tensor] = _weighed(gated.up, _rows(plan, gated.up, blocks), weighed)
        tensors[out.matrix.tensor] = _columns(plan, out.matrix, groups, size)
        biases = {name: _bias(tensors, getattr(gated, name), groups, size) for name in ("gate_bias", "up_bias")}
        if weighed is not None and biases["up_bias"] is not None:
            tensors[biases["up_bias"]] = tensors[biases["up_bias"]] * np.repeat(weighed, BLOCK)
        narrow = {name: replace(getattr(gated, name), rows=width) for name in ("gate", "up")}
        steps[at] = replace(gated, to=buffer, **narrow)  # type: ignore[arg-type]
        steps[below] = replace(down, src=buffer, outputs=(replace(out, matrix=replace(out.matrix, cols=width)),))
    made = replace(plan, steps=steps, tensors=tensors, widths=widths)
    check(made)
    return made


def _steps_of(plan: Plan, path: str) -> tuple[int, int]:
    found = gated_mlps(plan)
    if path not in found:
        raise UnsupportedPair(f"the plan has no gated MLP called {path!r} whose units can be taken", hint="choose in torch")
    return found[path]


def _writes(step: Step) -> list[int]:
    outputs = step.outputs if isinstance(step, Linear) else (step,)
    return [output.to for output in outputs if hasattr(output, "to")]


def _down(plan: Plan, at: int) -> Matrix:
    step = plan.steps[at]
    assert isinstance(step, Linear)
    return step.outputs[0].matrix


def _step_of(matrix: Matrix) -> int:
    """Columns that lie together."""
    return matrix.group if matrix.kind in BITS or matrix.kind in PALETTES else 2 if matrix.kind == "bf16" else 1


def _each(groups: Sequence[int], times: int) -> np.ndarray:
    return (np.asarray(groups)[:, None] * times + np.arange(times)).reshape(-1)


def _blocks(plan: Plan, matrix: Matrix) -> np.ndarray:
    """The bytes of a matrix, [blocks of rows, bytes]."""
    return plan.tensors[matrix.tensor].reshape(-1).view(np.uint8).reshape(-(-matrix.rows // BLOCK), -1)


def _rows(plan: Plan, matrix: Matrix, blocks: np.ndarray) -> np.ndarray:
    whole = _blocks(plan, matrix)
    out = room(len(blocks) * whole.shape[1])
    np.take(whole, blocks, 0, out=out.reshape(len(blocks), -1))
    return out


def _columns(plan: Plan, matrix: Matrix, groups: Sequence[int], size: int) -> np.ndarray:
    whole = _blocks(plan, matrix)
    front = _TABLES if matrix.kind in PALETTES else 0
    step = _step_of(matrix)
    places = _each(groups, size // step)
    parts = whole[:, front:].reshape(len(whole), matrix.cols // step, -1)
    out = room(matrix_bytes(matrix.kind, matrix.rows, len(groups) * size, matrix.group, matrix.minimum))
    table = out.reshape(len(whole), -1)
    table[:, :front] = whole[:, :front]
    table[:, front:] = parts[:, places].reshape(len(whole), -1)
    return out


def _weighed(matrix: Matrix, data: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """Rows times a factor for each block of them, in place: `data` is a copy already."""
    if factors is None or bool((factors == 1).all()):
        return data
    table = data.reshape(len(factors), -1)
    if matrix.kind in PALETTES:
        tables = table[:, :_TABLES].view(np.float16)
        tables[:] = tables * factors[:, None]
    elif matrix.kind in BITS:
        group_bytes = table.shape[1] // -(-matrix.cols // matrix.group)
        scales = table.reshape(len(factors), -1, group_bytes)[:, :, : 128 if matrix.minimum else 64].view(np.float16)
        scales[:] = scales * factors[:, None, None]
    elif matrix.kind == "f32":
        values = table.view(np.float32)
        values *= factors[:, None]
    else:
        short = table.view(np.uint16)
        short[:] = to_bfloat(from_bfloat(short) * factors[:, None])
    return data


def _bias(tensors: dict[str, np.ndarray], name: str | None, groups: Sequence[int], size: int) -> str | None:
    if name is not None:
        tensors[name] = np.ascontiguousarray(tensors[name][_each(groups, size)])
    return name
