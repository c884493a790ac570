"""Hold every number of a plan against its tensors and the other numbers, before native code believes any of them.

Native code reads and writes memory by these numbers and asks no further: a plan from a damaged file has to stop here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from orchard.core.errors import BadFile
from orchard.ops.kernels.packing import BLOCKS_GROUP, PALETTE_GROUP, PALETTES, PLAIN, matrix_bytes
from orchard.ops.plan import codes, steps

LARGEST = 2**31 - 1
WIDEST = 2**24
"""No buffer is wider: widths are multiplied by rows in native code."""


def check(plan: steps.Plan) -> None:
    """Raise `BadFile` unless every step can run."""
    _Check(plan).run()


class _Check:
    """Walks the steps in order and knows which buffers and stores hold something by then."""

    def __init__(self, plan: steps.Plan) -> None:
        self.plan = plan
        self.place = "the plan"
        self.written: set[int] = set()
        self.filled: set[int] = set()
        self.narrowed = False
        self.ever_written: set[int] = set()

    def run(self) -> None:
        plan = self.plan
        for name in ("vocab", "context", "dim"):
            self.count(getattr(plan, name), name)
        for width in plan.widths:
            self.count(width, "width", WIDEST)
        self.must(bool(plan.steps) and isinstance(plan.steps[0], steps.Embed), "it does not begin with an embedding")
        self.must(isinstance(plan.steps[-1], steps.Head), "it does not end with a head")
        for index, spec in enumerate(plan.stores):
            self.place = f"store {index}"
            self.store(spec)
        self.must(len({spec.layer for spec in plan.stores}) == len(plan.stores), "two stores of one layer")
        for index, rotary in enumerate(plan.rotaries):
            self.place = f"rotary table {index}"
            self.must(bool(np.isfinite(self.vector(rotary.tensor)).all()), "a frequency is not finite")
            self.number(rotary.gain, "gain")
        for index, step in enumerate(plan.steps):
            self.place = f"step {index} ({getattr(step, 'kind', '?')})"
            check_step = STEPS.get(type(step))
            self.must(check_step is not None, "no such step")
            check_step(self, step)  # type: ignore[misc]
            self.must(not isinstance(step, steps.Head) or index == len(plan.steps) - 1, "steps follow the head")
            self.must(not isinstance(step, steps.Embed) or index == 0, "a second embedding")
        self.place = "the plan"
        self.must(len(self.filled) == len(plan.stores), "a store is never written")
        # Memory is taken for every buffer: its width has to be that of something real.
        self.must(len(self.ever_written) == len(plan.widths), "a buffer is never written")

    # Single facts -------------------------------------------------------------------------------------------------

    def must(self, holds: bool, problem: str) -> None:
        if not holds:
            raise BadFile(f"damaged plan: {self.place}: {problem}", hint="make the packed file again from its source")

    def count(self, value: Any, name: str, most: int = LARGEST, least: int = 1) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and least <= value <= most):  # thousands of these: the words are put together for a bad one only
            self.must(False, f"{name} is {value!r}")

    def number(self, value: Any, name: str, *, negative: bool = True) -> None:
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        # Native code keeps single precision.
        self.must(real and abs(value) < 3e38 and (negative or value >= 0), f"{name} is {value!r}")

    def flag(self, value: Any, name: str) -> None:
        self.must(isinstance(value, bool), f"{name} is {value!r}")

    def one_of(self, value: Any, known: tuple[str, ...], name: str) -> None:
        self.must(value in known, f"no {name} is called {value!r}")

    def tensor(self, name: Any) -> np.ndarray:
        value = self.plan.tensors.get(name) if isinstance(name, str) else None
        if not isinstance(value, np.ndarray):
            self.must(False, f"no tensor is called {name!r}")
        assert value is not None
        if value.ndim != 1 or not value.flags.c_contiguous:
            self.must(False, f"the tensor {name!r} is not one run of numbers")
        return value

    def vector(self, name: Any, length: int | None = None) -> np.ndarray:
        value = self.tensor(name)
        if value.dtype != np.float32:
            self.must(False, f"the tensor {name!r} is {value.dtype}, not float32")
        self.must(length is None or len(value) == length, f"the tensor {name!r} has {len(value)} numbers, not {length}")
        return value

    def bias(self, name: str | None, length: int) -> None:
        """A number for each row, where there are any."""
        if name is not None:
            self.vector(name, length)

    def norm(self, norm: steps.Norm | None, length: int) -> None:
        if norm is not None:
            self.vector(norm.tensor, length)
            self.number(norm.eps, "eps", negative=False)

    def matrix(self, matrix: steps.Matrix, rows: int, cols: int, count: int = 1) -> None:
        shape, wanted = (matrix.count, matrix.rows, matrix.cols), (count, rows, cols)
        if shape != wanted:
            self.must(False, f"the matrix {matrix.tensor!r} is {shape}, not {wanted}")
        for size in shape:
            self.count(size, "a size")
        self.one_of(matrix.kind, steps.KINDS, "kind of matrix")
        self.flag(matrix.minimum, "minimum")
        self.count(matrix.group, "group", WIDEST)
        if matrix.kind in PLAIN:
            self.must(matrix.group == 1 and not matrix.minimum, "a matrix of plain numbers has no groups")
        elif matrix.kind in PALETTES:
            self.must(matrix.group == PALETTE_GROUP and not matrix.minimum, "a palette has groups of its own")
        elif matrix.kind == "blocks":
            self.must(matrix.group == BLOCKS_GROUP and not matrix.minimum, "blocks have groups of their own")
        else:
            self.must(matrix.group % 32 == 0, f"groups of {matrix.group} are no multiple of 32")
        size = count * matrix_bytes(matrix.kind, rows, cols, matrix.group, matrix.minimum)
        if matrix.tensor in self.plan.elsewhere and count > 1:
            known = self.plan.elsewhere[matrix.tensor]
            self.must(known == size, f"{matrix.tensor!r} has {known} bytes elsewhere, not {size}")
            return
        data = self.tensor(matrix.tensor)
        if data.dtype != np.uint8:
            self.must(False, f"the tensor {matrix.tensor!r} is {data.dtype}, not bytes")
        if len(data) != size:
            self.must(False, f"the tensor {matrix.tensor!r} has {len(data)} bytes, not {size}")

    def width(self, buffer: Any) -> int:
        self.count(buffer, "buffer", len(self.plan.widths) - 1, least=0)
        return self.plan.widths[buffer]

    def read(self, buffer: Any) -> int:
        """The width of a buffer that holds something."""
        width = self.width(buffer)
        self.must(buffer in self.written, f"buffer {buffer} is read before it is written")
        return width

    def write(self, buffer: Any, reads: tuple[int, ...], *, add: bool = False) -> int:
        """The width of a buffer that holds something from now on."""
        self.flag(add, "add")
        width = self.read(buffer) if add else self.width(buffer)
        self.must(buffer not in reads, f"buffer {buffer} is read and written at once")
        self.written.add(buffer)
        self.ever_written.add(buffer)
        return width

    # Stores and steps ---------------------------------------------------------------------------------------------

    def store(self, spec: steps.StoreSpec) -> None:
        self.count(spec.layer, "layer", least=0)
        self.count(spec.heads, "heads", WIDEST)
        self.count(spec.dim, "dim", WIDEST)
        self.one_of(spec.codec, steps.CODECS, "codec")
        self.count(spec.keep, "keep", steps.ENDLESS, least=0)
        self.count(spec.sinks, "sinks", steps.ENDLESS, least=0)
        self.must(spec.keep > 0 or spec.sinks == 0, "sinks without a window")
        self.must(
            (spec.codec == "vq") == (spec.books is not None), "codes without codebooks, or codebooks without codes"
        )
        if spec.books is not None:
            self.books(spec, spec.books)

    def books(self, spec: steps.StoreSpec, books: codes.BooksSpec) -> None:
        self.must(spec.keep == 0, "codes with a window")
        self.must(spec.dim % 2 == 0 and spec.dim <= codes.WIDEST, f"codes of {spec.dim} channels")
        for rounds in (books.key_rounds, books.value_rounds):
            self.count(rounds, "rounds", codes.MOST_ROUNDS)
        self.must(books.value_rounds % 2 == 0, f"{books.value_rounds} rounds of values")
        for words in (books.key_words, books.value_words):
            self.count(words, "codewords", codes.MOST_WORDS, least=2)
            self.must(words & (words - 1) == 0, f"{words} codewords")
        self.count(books.exact, "exact", codes.MOST_EXACT, least=0)
        for name, length in books.lengths(spec.heads, spec.dim):
            self.must(bool(np.isfinite(self.vector(name, length)).all()), f"a number of {name!r} is not finite")

    def embed(self, step: steps.Embed) -> None:
        self.number(step.scale, "scale")
        self.must(self.write(step.to, ()) == self.plan.dim, "the embedding is not as wide as the model")
        self.matrix(step.matrix, self.plan.vocab, self.plan.dim)

    def linear(self, step: steps.Linear) -> None:
        width = self.read(step.src)
        self.norm(step.norm, width)
        targets = [output.to for output in step.outputs]
        self.must(bool(targets) and len(set(targets)) == len(targets), "outputs are missing or meet in one buffer")
        for output in step.outputs:
            rows = self.write(output.to, (step.src,), add=output.add)
            self.matrix(output.matrix, rows, self.part(output, width))
            self.bias(output.bias, rows)
            self.bias(output.gain, rows)

    def part(self, output: steps.Output, width: int) -> int:
        """Columns of the input that an output reads."""
        if output.begin is None and output.width is None:
            return width
        cols = output.matrix.cols
        self.count(cols, "columns", width)
        self.count(output.begin, "begin", width - cols, least=0)
        self.must(output.width == width, f"a part of {output.width!r} columns where there are {width}")
        self.must(output.matrix.kind in ("f32", "f16"), f"a part of the input for a matrix of {output.matrix.kind}")
        return cols

    def gated(self, step: steps.Gated) -> None:
        width = self.read(step.src)
        rows = self.write(step.to, (step.src,))
        self.norm(step.norm, width)
        self.one_of(step.activation, steps.ACTIVATIONS, "activation")
        for matrix, bias in ((step.gate, step.gate_bias), (step.up, step.up_bias)):
            self.matrix(matrix, rows, width)
            self.bias(bias, rows)

    def gate(self, step: steps.Gate) -> None:
        width = self.read(step.gate)
        self.must(self.read(step.up) == width, "a gate of another width")
        self.must(self.write(step.to, (step.gate, step.up)) == width, "the result has another width")
        self.one_of(step.activation, steps.ACTIVATIONS, "activation")

    def attend(self, step: steps.Attend) -> None:
        for name in ("heads", "kv_heads", "dim"):
            self.count(getattr(step, name), name, WIDEST)
        self.must(step.heads % step.kv_heads == 0, f"{step.heads} heads cannot share {step.kv_heads}")
        self.must(self.read(step.q) == step.heads * step.dim, "queries of another width")
        self.count(step.store, "store", len(self.plan.stores) - 1, least=0)
        spec = self.plan.stores[step.store]
        self.must((spec.heads, spec.dim) == (step.kv_heads, step.dim), "a store of other heads")
        self.must((step.k is None) == (step.v is None), "keys without values, or values without keys")
        sides = () if step.k is None or step.v is None else (step.k, step.v)
        for side in sides:
            self.must(self.read(side) == step.kv_heads * step.dim, "keys or values of another width")
        if sides:
            self.must(not self.narrowed, "a store is written after rows were dropped")
            self.must(step.store not in self.filled, "a store is written twice")
            self.filled.add(step.store)
        self.must(step.store in self.filled, "a store is read before it is written")
        self.must(bool(sides) or step.k_norm is None, "a norm of keys that are not there")
        self.norm(step.q_norm, step.dim)
        self.norm(step.k_norm, step.dim)
        self.number(step.scale, "scale")
        self.number(step.softcap, "softcap", negative=False)
        self.count(step.window, "window", steps.ENDLESS, least=0)
        if step.rotary is not None:
            self.count(step.rotary, "rotary", len(self.plan.rotaries) - 1, least=0)
            table = self.vector(self.plan.rotaries[step.rotary].tensor)
            self.must(2 * len(table) <= step.dim, "more channels are rotated than there are")
            whole = spec.books is None or not sides or 2 * len(table) == step.dim
            self.must(whole, "a part of the channels is rotated, and all of them are coded")
        width = self.write(step.to, (step.q, *sides))
        self.must(width == step.heads * step.dim, "the result has another width")

    def normalise(self, step: steps.Normalise) -> None:
        width = self.read(step.src)
        self.count(step.groups, "groups", width)
        self.must(width % step.groups == 0, f"{step.groups} groups do not divide {width}")
        self.must(self.write(step.to, (step.src,), add=step.add) == width, "source and target differ in width")
        self.norm(step.norm, width // step.groups)

    def add(self, step: steps.Add) -> None:
        width = self.read(step.src)
        self.must(self.write(step.to, (step.src,), add=True) == width, "source and target differ in width")

    def clip(self, step: steps.Clip) -> None:
        self.read(step.buffer)
        self.number(step.bound, "bound", negative=False)

    def experts(self, step: steps.Experts) -> None:
        width = self.read(step.src)
        reads = () if step.add is True else (step.src,)  # their input is read as a whole before anything is added
        self.must(self.write(step.to, reads, add=step.add) == width, "source and target differ in width")
        count, hidden = step.gate.count, step.gate.rows
        self.count(step.k, "k", count if isinstance(count, int) else 0)
        self.flag(step.renormalize, "renormalize")
        self.one_of(step.activation, steps.ACTIVATIONS, "activation")
        self.norm(step.norm, width)
        self.matrix(step.router, count, width)
        self.bias(step.router_bias, count)
        self.count(hidden, "hidden width", WIDEST)
        for matrix in (step.gate, step.up):
            self.matrix(matrix, hidden, width, count)
        self.matrix(step.down, width, hidden, count)

    def narrow(self, step: steps.Narrow) -> None:
        self.must(not self.narrowed, "rows are dropped twice")
        self.must(
            bool(step.buffers) and len(set(step.buffers)) == len(step.buffers), "buffers are missing or named twice"
        )
        for buffer in step.buffers:
            self.read(buffer)
        self.narrowed, self.written = True, set(step.buffers)

    def torch(self, step: steps.Torch) -> None:
        self.must(not self.narrowed, "a module in torch needs rows that were dropped")
        self.must(isinstance(step.node, str) and bool(step.node), "a module without a path")
        self.must(isinstance(step.reason, str), "a reason that is no text")
        self.read(step.src)
        self.write(step.to, (step.src,))

    def head(self, step: steps.Head) -> None:
        width = self.read(step.src)
        self.norm(step.norm, width)
        self.matrix(step.matrix, self.plan.vocab, width)
        self.bias(step.bias, self.plan.vocab)
        self.number(step.softcap, "softcap", negative=False)


STEPS: dict[type, Callable[[_Check, Any], None]] = {
    steps.Embed: _Check.embed,
    steps.Linear: _Check.linear,
    steps.Gated: _Check.gated,
    steps.Gate: _Check.gate,
    steps.Attend: _Check.attend,
    steps.Normalise: _Check.normalise,
    steps.Add: _Check.add,
    steps.Clip: _Check.clip,
    steps.Experts: _Check.experts,
    steps.Narrow: _Check.narrow,
    steps.Head: _Check.head,
    steps.Torch: _Check.torch,
}
