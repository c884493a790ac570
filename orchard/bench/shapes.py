"""Models of a given shape with random weights, for speed only: a plan of Orchard's engine, and a GGUF file for llama.cpp.

Speed does not depend on the values as long as they are finite, so a short run of random bytes is repeated and every scale is
the same small number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import UsageError
from orchard.ops.kernels.packing import matrix_bytes
from orchard.ops.plan.steps import Attend, Embed, Gated, Head, Linear, Matrix, Narrow, Norm, Output, Plan, RotarySpec
from orchard.ops.plan.steps import StoreSpec as Stored
from orchard.weights.gguf.reader import GGUFFile
from orchard.weights.gguf.types import GGMLType
from orchard.weights.gguf.writer import TensorOut, write_gguf

BITS = {"q8": 8, "q4": 4, "q2": 2}
SCALE = 0.002
"""Of every group: with codes spread evenly, sums over some thousand columns stay far from the limits of bfloat16."""


@dataclass(frozen=True)
class Shape:
    """A decoder as Llama has it: grouped queries, gated MLP, one table for input and output."""

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head: int = 64
    vocab: int = 49_152
    context: int = 4_096

    def matrices(self) -> list[tuple[str, int, int]]:
        """Name in GGUF, rows and columns of one layer's matrices."""
        inner, kv = self.heads * self.head, self.kv_heads * self.head
        return [
            ("attn_q", inner, self.width),
            ("attn_k", kv, self.width),
            ("attn_v", kv, self.width),
            ("attn_output", self.width, inner),
            ("ffn_gate", self.hidden, self.width),
            ("ffn_up", self.hidden, self.width),
            ("ffn_down", self.width, self.hidden),
        ]

    @property
    def parameters(self) -> int:
        """Of all matrices, the table counted once."""
        return self.vocab * self.width + self.layers * sum(rows * cols for _, rows, cols in self.matrices())

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, two bytes a number."""
        return self.layers * self.kv_heads * self.head * 2 * 2


def packed_matrix(rows: int, cols: int, bits: int, group: int, random: np.random.Generator) -> np.ndarray:
    """Bytes of a packed matrix without minima (kernels.h has the layout): equal scales, random codes."""
    size = matrix_bytes(f"q{bits}", rows, cols, group)
    scales = np.full(32, SCALE * 8 / 2 ** (bits - 1), np.float16).view(np.uint8)
    codes = 32 * group * bits // 8
    period = np.empty((64, len(scales) + codes), np.uint8)  # 64 groups, over and over
    period[:, : len(scales)] = scales
    period[:, len(scales) :] = random.integers(0, 256, (64, codes), np.uint8)
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64  # kernels load from boundaries of 64 bytes
    groups = room[start : start + size].reshape(-1, period.shape[1])
    for at in range(0, len(groups), len(period)):
        groups[at : at + len(period)] = period[: len(groups) - at]
    return groups.reshape(-1)


def random_plan(shape: Shape, kind: str, *, group: int = 64) -> Plan:
    """A plan of this shape with matrices of `kind` (q8, q4, q2), the head among them."""
    if kind not in BITS:
        raise UsageError(f"no packed kind {kind!r}", hint="one of " + ", ".join(BITS))
    random, tensors = np.random.default_rng(0), dict[str, np.ndarray]()

    def matrix(name: str, rows: int, cols: int) -> Matrix:
        tensors[name] = packed_matrix(rows, cols, BITS[kind], group, random)
        return Matrix(name, kind, rows, cols, group=group)

    def norm(name: str) -> Norm:
        tensors[name] = np.ones(shape.width, np.float32)
        return Norm(name, 1e-5)

    inner, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    x, q, k, v, seen, gated = range(6)
    table = matrix("table", shape.vocab, shape.width)
    steps: list[Any] = [Embed(table, to=x)]
    for layer in range(shape.layers):
        own = {name: matrix(f"{layer}.{name}", rows, cols) for name, rows, cols in shape.matrices()}
        parts = (Output(own["attn_q"], q), Output(own["attn_k"], k), Output(own["attn_v"], v))
        steps += [
            Linear(x, parts, norm=norm(f"{layer}.attn_norm")),
            Attend(
                *(q, k, v, seen, layer, shape.heads, shape.kv_heads, shape.head),
                scale=1 / math.sqrt(shape.head),
                rotary=0,
            ),
            Linear(seen, (Output(own["attn_output"], x, add=True),)),
            Gated(x, own["ffn_gate"], own["ffn_up"], gated, norm=norm(f"{layer}.ffn_norm")),
            Linear(gated, (Output(own["ffn_down"], x, add=True),)),
        ]
    steps += [Narrow((x,)), Head(x, table, norm=norm("norm"))]
    tensors["rotary"] = (1e4 ** -(np.arange(0, shape.head, 2) / shape.head)).astype(np.float32)
    return Plan(
        vocab=shape.vocab,
        context=shape.context,
        dim=shape.width,
        widths=[shape.width, inner, kv, kv, inner, shape.hidden],
        steps=steps,
        stores=[Stored(layer, shape.kv_heads, shape.head) for layer in range(shape.layers)],
        rotaries=[RotarySpec("rotary")],
        tensors=tensors,
    )


def plan_bytes(plan: Plan) -> int:
    """Bytes of weights that one step reads: all of them, the table once (as the head; the input takes one row of it)."""
    return sum(tensor.nbytes for tensor in plan.tensors.values())


def packed_bytes(shape: Shape, kind: str, group: int = 64) -> int:
    """The same without making anything."""
    each = [(shape.vocab, shape.width), *[(rows, cols) for _, rows, cols in shape.matrices()] * shape.layers]
    return sum(matrix_bytes(kind, rows, cols, group) for rows, cols in each)


def write_random_gguf(path: Path, shape: Shape, words: Path) -> None:
    """A Llama of Q4_0 matrices; `words` is a GGUF file that gives its vocabulary."""
    with GGUFFile.open(words) as file:
        metadata: dict[str, Any] = {k: v for k, v in file.typed_metadata().items() if k.startswith("tokenizer.")}
    metadata = {
        "general.architecture": "llama",
        "general.name": "random weights, for speed only",
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.width,
        "llama.feed_forward_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": shape.head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "llama.vocab_size": shape.vocab,
        **metadata,
    }
    random = np.random.default_rng(0)
    tensors = [_q4_0("token_embd.weight", shape.vocab, shape.width, random), _ones("output_norm.weight", shape.width)]
    for layer in range(shape.layers):
        tensors += [_q4_0(f"blk.{layer}.{name}.weight", rows, cols, random) for name, rows, cols in shape.matrices()]
        tensors += [_ones(f"blk.{layer}.{name}.weight", shape.width) for name in ("attn_norm", "ffn_norm")]
    write_gguf(path, metadata, tensors)


def _q4_0(name: str, rows: int, cols: int, random: np.random.Generator) -> TensorOut:
    def data() -> np.ndarray:
        period = np.empty((4096, 18), np.uint8)  # a block of 32: a float16 scale, then 16 bytes of codes
        period[:, :2] = np.full(1, SCALE, np.float16).view(np.uint8)
        period[:, 2:] = random.integers(0, 256, (4096, 16), np.uint8)
        return np.resize(period, (rows * cols // 32, 18)).reshape(-1)

    return TensorOut(name, (rows, cols), GGMLType.Q4_0, data)


def _ones(name: str, width: int) -> TensorOut:
    return TensorOut(name, (width,), GGMLType.F32, lambda: np.ones(width, np.float32))
