"""A plan with the side paths of adapters: the same tensors and steps, and beside some matrices two small ones more.

y = W x + Σ scale · B (A x), and the weight W is not touched. The rows of A join the step that reads x already (so x is
normalised once), into a buffer as wide as the rank; a step after it adds B times that buffer to where W x went. Where ranks
are small the matrices of one step share one A, and each B has zeros where the ranks of the others are: one step more instead
of three. A `Gated` step comes apart for it into a `Linear` and a `Gate`, for its side paths end before the gate. DoRA's gain on
whole rows (arXiv 2402.09353) stands on the output of W, and is multiplied into B.

No tensor of the plan is copied, so a plan and all its adapted forms cost little more than one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.ops.kernels import packing
from orchard.ops.kernels.packing import pack_plain
from orchard.ops.plan import steps
from orchard.ops.plan.check import check
from orchard.ops.plan.steps import Gate, Gated, Linear, Matrix, Output, Plan, Step

Side = tuple[np.ndarray, np.ndarray, float]
"""A [rank, in], B [out, rank], and what their product is multiplied with."""
TINY = 1e-30
"""Rows with a smaller square are as good as zero, and have no direction."""
SHARED_RANKS = 64
"""Up to so many ranks of one step share an A: the zeros that this puts into B cost less than further steps would."""
SIDE_TENSOR = re.compile(r"\.lora\d*\.")
"""In the name of every tensor that belongs to a side path and not to the model."""


def adapted(
    plan: Plan,
    sides: Mapping[str, Sequence[Side]],
    biases: Mapping[str, Sequence[np.ndarray]] | None = None,
    magnitudes: Mapping[str, np.ndarray] | None = None,
    *,
    kind: str | None = None,
) -> Plan:
    """The plan with side paths, by the path of the module whose matrix they go beside (`stack.layers.0.mixer.q`; the name of
    the matrix's tensor will do too). Those of one module add up.

    `biases` stand in place of a module's own: of several, each counts by how far it is from that. `magnitudes` are DoRA's: the
    lengths that rows of W + scale · B A get, beside a single side path. `kind` ("f32" or "bf16") is how A and B are kept; without
    one, as exactly as the matrix beside them. A module that runs in torch is left to whoever runs it. `UnsupportedPair` names a
    module whose step has no room for a side path, `ConfigError` one that is not there.
    """
    if kind not in (None, "f32", "bf16"):
        raise ConfigError(f"side paths cannot be kept as {kind!r}", hint="use 'f32' or 'bf16'")
    lengths = {_module(name): np.asarray(values, np.float32) for name, values in (magnitudes or {}).items()}
    made = _Adapting(plan, _by_module(sides), _by_module(biases or {}), lengths, kind).run()
    check(made)
    return made


def parts(plan: Plan) -> tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray]]:
    """What the model behind a plan consists of, side paths left out: the shapes of all its tensors by name, and the values of
    those with one dimension (norms and biases), which no format packs."""
    shapes = dict(_matrix_shapes(plan))
    rotaries = {rotary.tensor for rotary in plan.rotaries}
    vectors = {
        name: value
        for name, value in plan.tensors.items()
        if name not in shapes and name not in rotaries and not SIDE_TENSOR.search(name)
    }
    return shapes | {name: (len(value),) for name, value in vectors.items()}, vectors


def _matrix_shapes(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    for step in plan.steps:
        for matrix in _matrices(step):
            if not SIDE_TENSOR.search(matrix.tensor):
                experts = isinstance(step, steps.Experts) and matrix is not step.router
                yield matrix.tensor, (matrix.count,) * experts + (matrix.rows, matrix.cols)


def _matrices(step: Step) -> list[Matrix]:
    if isinstance(step, Linear):
        return [output.matrix for output in step.outputs]
    found = (getattr(step, name, None) for name in ("matrix", "router", "gate", "up", "down"))
    return [matrix for matrix in found if isinstance(matrix, Matrix)]


def _by_module(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, values in given.items():
        found.setdefault(_module(name), []).extend(values)
    return {name: values for name, values in found.items() if values}


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


class _Adapting:
    """Goes through the steps of a plan once."""

    def __init__(
        self,
        plan: Plan,
        sides: dict[str, list[Side]],
        biases: dict[str, list[np.ndarray]],
        magnitudes: dict[str, np.ndarray],
        kind: str | None,
    ) -> None:
        self.plan, self.sides, self.biases, self.magnitudes, self.kind = plan, sides, biases, magnitudes, kind
        self.tensors = dict(plan.tensors)
        self.widths = list(plan.widths)
        self.buffers: dict[tuple[int, str], int] = {}
        self.left = {*sides, *biases}
        """Modules whose steps have not come yet."""
        # A plan that was adapted before has side paths already: the new ones get a number of their own.
        self.layer = 1 + max((int(n) for name in plan.tensors for n in re.findall(r"\.lora(\d+)\.", name)), default=-1)
        wide = (name for name in plan.tensors if SIDE_TENSOR.search(name) and name.endswith(".b.weight"))
        self.adapted = {SIDE_TENSOR.split(name)[0] for name in wide}
        without = sorted(magnitudes.keys() - sides.keys())
        if without:
            raise ConfigError(f"{without[0]}: lengths of rows without a side path", hint="give its A and B too")

    def run(self) -> Plan:
        made: list[Step] = []
        for step in self.plan.steps:
            names = [name for name in map(_module, (matrix.tensor for matrix in _matrices(step))) if name in self.left]
            if isinstance(step, steps.Torch):
                self.left = {name for name in self.left if not f"{name}.".startswith(f"{step.node}.")}
            if not names:
                made.append(step)
            elif isinstance(step, Linear):
                made.extend(self._linear(step))
            elif isinstance(step, Gated):
                made.extend(self._gated(step))
            else:
                raise UnsupportedPair(
                    f"{names[0]}: no side path goes beside a matrix of the step {step.kind!r}",
                    hint="adapt the linear maps of attention and MLPs; experts, routers, embeddings and heads stay as they are",
                )
            self.left.difference_update(names)
        if self.left:
            raise ConfigError(
                f"the model has no linear map called {', '.join(sorted(self.left)[:3])}",
                hint="names are paths of modules, such as 'stack.layers.0.mixer.q'",
            )
        return replace(self.plan, steps=made, tensors=self.tensors, widths=self.widths)

    def _linear(self, step: Linear) -> list[Step]:
        outputs = tuple(self._gained(self._biased(output)) for output in step.outputs)
        found = [(output, self.sides.get(_module(output.matrix.tensor), [])) for output in outputs]
        found = [(output, sides) for output, sides in found if sides]
        if not found:
            return [replace(step, outputs=outputs)]
        ranks = sum(len(side[0]) for _, sides in found for side in sides)
        groups = [found] if ranks <= SHARED_RANKS else [[each] for each in found]
        paths = [self._side_path(group, f"ranks {number}") for number, group in enumerate(groups)]
        return [replace(step, outputs=(*outputs, *(narrow for narrow, _ in paths))), *(wide for _, wide in paths)]

    def _gated(self, step: Gated) -> list[Step]:
        if not any(_module(matrix.tensor) in self.sides for matrix in (step.gate, step.up)):
            gate, up = (
                self._biased(Output(matrix=matrix, to=step.to, bias=bias)).bias
                for matrix, bias in ((step.gate, step.gate_bias), (step.up, step.up_bias))
            )
            return [replace(step, gate_bias=gate, up_bias=up)]
        gate_to, up_to = self._buffer(step.gate.rows, "gate"), self._buffer(step.up.rows, "up")
        outputs = (
            Output(matrix=step.gate, to=gate_to, bias=step.gate_bias),
            Output(matrix=step.up, to=up_to, bias=step.up_bias),
        )
        maps = self._linear(Linear(src=step.src, outputs=outputs, norm=step.norm))
        return [*maps, Gate(gate=gate_to, up=up_to, to=step.to, activation=step.activation)]

    def _side_path(self, found: list[tuple[Output, list[Side]]], use: str) -> tuple[Output, Linear]:
        """What joins a step as a further output, and the step that follows it."""
        narrow = [_checked(output.matrix, side)[0] for output, sides in found for side in sides]
        ranks = sum(len(a) for a in narrow)
        exact = all(output.matrix.kind == "f32" for output, _ in found)
        kind = self.kind or ("f32" if exact else "bf16")
        between = self._buffer(ranks, use)
        first = _module(found[0][0].matrix.tensor)
        a = Output(matrix=self._matrix(f"{first}.lora{self.layer}.a", np.concatenate(narrow), kind), to=between)
        wide, place = [], 0
        for output, sides in found:
            b = np.zeros((output.matrix.rows, ranks), np.float32)
            gain = 1 if output.gain is None else self.tensors[output.gain][:, None]
            for _, columns, scale in sides:
                b[:, place : place + columns.shape[1]] = np.asarray(columns, np.float32) * np.float32(scale) * gain
                place += columns.shape[1]
            name = f"{_module(output.matrix.tensor)}.lora{self.layer}.b"
            wide.append(Output(matrix=self._matrix(name, b, kind), to=output.to, add=True))
        return a, Linear(src=between, outputs=tuple(wide))

    def _gained(self, output: Output) -> Output:
        """With DoRA's gain: what brings each row of the adapted matrix to its length."""
        module = _module(output.matrix.tensor)
        length, sides = self.magnitudes.get(module), self.sides.get(module, [])
        if (length is not None and (len(sides) > 1 or module in self.adapted)) or (sides and output.gain is not None):
            raise UnsupportedPair(
                f"{module} has several side paths, and one is DoRA's", hint="apply a DoRA adapter alone"
            )
        if length is None:
            return output
        if length.shape != (output.matrix.rows,):
            problem = f"{module}: lengths of shape {length.shape} for {output.matrix.rows} rows"
            raise ConfigError(problem, hint="make them equal")
        a, b = _checked(output.matrix, sides[0])
        matrix = output.matrix
        packed = self.plan.tensors[matrix.tensor]
        dense = packing.values(packed, matrix.kind, matrix.rows, matrix.cols, matrix.group, matrix.minimum)
        name = f"{module}.lora{self.layer}.gain"
        self.tensors[name] = gain_of(dense, a, b, sides[0][2], length)
        return replace(output, gain=name)

    def _biased(self, output: Output) -> Output:
        module = _module(output.matrix.tensor)
        given = self.biases.get(module)
        if given is None:
            return output
        rows = output.matrix.rows
        own = np.zeros(rows, np.float32) if output.bias is None else self.plan.tensors[output.bias]
        for bias in given:
            if np.shape(bias) != (rows,):
                raise ConfigError(f"{module}: a bias of shape {np.shape(bias)} for {rows} rows", hint="make them equal")
        total = own + sum((np.asarray(bias, np.float32) - own for bias in given), np.zeros(rows, np.float32))
        name = f"{module}.lora{self.layer}.bias"
        self.tensors[name] = np.ascontiguousarray(total, np.float32)
        return replace(output, bias=name)

    def _matrix(self, name: str, values: np.ndarray, kind: str) -> Matrix:
        rows, cols = values.shape
        self.tensors[f"{name}.weight"] = pack_plain(np.ascontiguousarray(values, np.float32), kind)
        return Matrix(tensor=f"{name}.weight", kind=kind, rows=rows, cols=cols)

    def _buffer(self, width: int, use: str) -> int:
        """A buffer beside those of the plan. What is in it is read by the next steps and never again, so steps share it."""
        if (width, use) not in self.buffers:
            self.buffers[width, use] = len(self.widths)
            self.widths.append(width)
        return self.buffers[width, use]


def gain_of(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, magnitude: np.ndarray) -> np.ndarray:
    """What brings each row of `weight + scale · b a` to the length that DoRA wants it to have."""
    rows = weight + (b * np.float32(scale)) @ a
    squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return np.ascontiguousarray(magnitude / np.sqrt(np.maximum(squares, TINY)), np.float32)


def _checked(matrix: Matrix, side: Side) -> tuple[np.ndarray, np.ndarray]:
    a, b = (np.asarray(part, np.float32) for part in side[:2])
    fits = a.ndim == b.ndim == 2 and len(a) and a.shape == (len(a), matrix.cols) and b.shape == (matrix.rows, len(a))
    if not fits:
        raise ConfigError(
            f"{_module(matrix.tensor)}: a side path of {a.shape} and {b.shape} beside [{matrix.rows}, {matrix.cols}]",
            hint="A is [rank, in] and B is [out, rank]",
        )
    return a, b
