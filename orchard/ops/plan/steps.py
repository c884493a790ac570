"""The steps of a plan, as the native engine runs them: numbered buffers, packed matrices, no modules and no torch.

A buffer is a float32 table with one row per token of the call and a fixed width. Steps run in order; each may read what
earlier ones wrote. What modules say (`builder`) is fused into these steps by `fuse`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from orchard.core.frozen import frozen
from orchard.ops.plan.codes import BooksSpec

KINDS = ("f32", "bf16", "q8", "q4", "q2", "f16", "p4", "p2", "blocks")
"""Kinds of packed matrices, in the order of Kind in kernels.h."""
CODECS = ("f32", "bf16", "int8", "vq")
"""Ways to keep a slot, in the order of Codec in kernels.h."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ENDLESS = 2**29
"""Longer than any sequence: a window that shows or keeps more shows everything. Sums of a few of these are still ints."""


@frozen
class Matrix:
    """A packed weight [rows, cols], or `count` of them one after another (experts). Layout: kernels/native/kernels.h."""

    tensor: str
    kind: str
    rows: int
    cols: int
    group: int = 1
    minimum: bool = False
    count: int = 1


@frozen
class Norm:
    """x / rms(x) · weight; the tensor is float32 with any offset already added."""

    tensor: str
    eps: float


@frozen
class Output:
    """One matrix of a `Linear`: where its result goes, and whether it is added to what is there."""

    matrix: Matrix
    to: int
    bias: str | None = None
    add: bool = False
    gain: str | None = None
    """What each row's product is multiplied with, before its bias is added (DoRA)."""
    begin: int | None = None
    """The matrix reads only a part of the input, which begins at this column: side paths that share their first half do. Plain
    numbers only (`f32`, `f16`)."""
    width: int | None = None
    """The input's width, where `begin` is given."""


class Step:
    """One of the classes below. `kind` is its name in files and on screens."""

    kind: ClassVar[str]


@frozen
class Embed(Step):
    """Rows of a table, by token id."""

    kind: ClassVar[str] = "embed"
    matrix: Matrix
    to: int
    scale: float = 1.0


@frozen
class Linear(Step):
    """One or more matrices times the same input, which may be normalised first."""

    kind: ClassVar[str] = "linear"
    src: int
    outputs: tuple[Output, ...]
    norm: Norm | None = None


@frozen
class Gated(Step):
    """act(gate(x)) · up(x)."""

    kind: ClassVar[str] = "gated"
    src: int
    gate: Matrix
    up: Matrix
    to: int
    activation: str = "silu"
    norm: Norm | None = None
    gate_bias: str | None = None
    up_bias: str | None = None


@frozen
class Gate(Step):
    """act(gate) · up of two buffers: where something comes between the matrices and the gate (an adapter's side path)."""

    kind: ClassVar[str] = "gate"
    gate: int
    up: int
    to: int
    activation: str = "silu"


@frozen
class Attend(Step):
    """Normalise heads, rotate, keep keys and values, attend. Without `k` and `v` the store of another layer is read."""

    kind: ClassVar[str] = "attend"
    q: int
    k: int | None
    v: int | None
    to: int
    store: int
    """Index into `Plan.stores`."""
    heads: int
    kv_heads: int
    dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    """0: none."""
    rotary: int | None = None
    """Index into `Plan.rotaries`."""
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@frozen
class Normalise(Step):
    """A norm by itself: over each of `groups` equal parts of a row; `add`: added to what is in `to`."""

    kind: ClassVar[str] = "norm"
    src: int
    to: int
    norm: Norm
    groups: int = 1
    add: bool = False


@frozen
class Add(Step):
    """to += src."""

    kind: ClassVar[str] = "add"
    src: int
    to: int


@frozen
class Clip(Step):
    """Every value of a buffer bounded to ±bound, in place."""

    kind: ClassVar[str] = "clip"
    buffer: int
    bound: float


@frozen
class Experts(Step):
    """Softmax router, the k best experts of each token, each a gated MLP; their weighted sum."""

    kind: ClassVar[str] = "experts"
    src: int
    router: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    k: int
    to: int
    renormalize: bool = True
    activation: str = "silu"
    norm: Norm | None = None
    router_bias: str | None = None
    add: bool = False


@frozen
class Narrow(Step):
    """From here on only the rows whose scores are wanted are needed: these buffers keep just them."""

    kind: ClassVar[str] = "narrow"
    buffers: tuple[int, ...]


@frozen
class Head(Step):
    """Scores of the wanted rows, into the caller's table."""

    kind: ClassVar[str] = "head"
    src: int
    matrix: Matrix
    norm: Norm | None = None
    bias: str | None = None
    softcap: float = 0.0


@frozen
class Torch(Step):
    """A module that has no native form runs in torch: `to` = module(src)."""

    kind: ClassVar[str] = "torch"
    src: int
    to: int
    node: str
    """The module's path in the model."""
    reason: str


@frozen
class StoreSpec:
    """A layer's keys and values. `keep` and `sinks` are the policy's window (0: everything is kept)."""

    layer: int
    heads: int
    dim: int
    codec: str = "bf16"
    keep: int = 0
    sinks: int = 0
    books: BooksSpec | None = None
    """The codebooks of a store of codes ("vq"), which has no window."""


@frozen
class RotarySpec:
    """Inverse frequencies (a float32 tensor [rotated / 2]) and the gain on rotated vectors."""

    tensor: str
    gain: float = 1.0


@dataclass
class Plan:
    """Everything a native run needs. `tensors`: float32 vectors, and packed matrices as bytes (uint8), by name."""

    vocab: int
    context: int
    dim: int
    widths: list[int]
    steps: list[Step]
    stores: list[StoreSpec] = field(default_factory=list)
    rotaries: list[RotarySpec] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Experts' matrices that are not among `tensors` but in a file of records, and how many bytes each has."""

    @property
    def whole(self) -> bool:
        """Whether every step is native."""
        return not any(isinstance(step, Torch) for step in self.steps)
