"""A plan run in plain float32, one step after another: what every faster way of running it is held against.

In numpy, so that a plan can be checked on a machine without torch too. Stores keep every token they ever saw and apply
windows when they are read, which is what the native engine's rings have to amount to.

Shapes: N rows (tokens of this call), S sequences, L longest sequence, H key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from orchard.core.errors import ConfigError
from orchard.ops.kernels import packing
from orchard.ops.plan import steps

Module = Callable[[str, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""`(node, x [N, width], sequences [N], positions [N]) → rows`: runs a module that has no native form."""


class Reference:
    """A plan with stores for `sequences` sequences of up to `length` tokens."""

    def __init__(self, plan: steps.Plan, sequences: int, length: int, module: Module | None = None) -> None:
        self.plan = plan
        self.module = module
        self.stores = [_Slots(spec, sequences, length) for spec in plan.stores]
        self._dense: dict[str, np.ndarray] = {}

    def run(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int], wanted: Sequence[int]
    ) -> np.ndarray:
        """Scores float32 [len(wanted), vocab] of those rows, after every row's token was put into the stores.

        The rows of a sequence come in the order of their positions; everything before them was in earlier calls.
        """
        self.buffers: list[np.ndarray] = [np.zeros((0, width), np.float32) for width in self.plan.widths]
        self.tokens = np.asarray(tokens, np.int64)
        self.sequences, self.positions = np.asarray(sequences, np.int64), np.asarray(positions, np.int64)
        self.wanted = np.asarray(wanted, np.int64)
        self.scores = np.zeros((0, self.plan.vocab), np.float32)
        for step in self.plan.steps:
            RUN[type(step)](self, step)
        return self.scores

    # Parts --------------------------------------------------------------------------------------------------------

    def matrix(self, matrix: steps.Matrix) -> np.ndarray:
        """[count, rows, cols] float32."""
        if matrix.tensor not in self._dense:
            parts = np.split(self.plan.tensors[matrix.tensor], matrix.count)
            shape = (matrix.rows, matrix.cols)
            kind, group, minimum = matrix.kind, matrix.group, matrix.minimum
            dense = [packing.values(part, kind, *shape, group, minimum).astype(np.float32) for part in parts]
            self._dense[matrix.tensor] = np.stack(dense)
        return self._dense[matrix.tensor]

    def product(
        self, x: np.ndarray, matrix: steps.Matrix, bias: str | None = None, gain: str | None = None
    ) -> np.ndarray:
        y = x @ self.matrix(matrix)[0].T
        y = y if gain is None else y * self.plan.tensors[gain]
        return y if bias is None else y + self.plan.tensors[bias]

    def normal(self, x: np.ndarray, norm: steps.Norm | None) -> np.ndarray:
        """Over the last dimension."""
        if norm is None:
            return x
        mean = np.square(x).mean(-1, keepdims=True, dtype=np.float32)
        return (x / np.sqrt(mean + np.float32(norm.eps)) * self.plan.tensors[norm.tensor]).astype(np.float32)

    def put(self, to: int, value: np.ndarray, *, add: bool = False) -> None:
        if add:
            value = self.buffers[to] + value
        assert value.shape == (len(self.positions), self.plan.widths[to]), (
            "a step wrote another shape than its buffer has"
        )
        self.buffers[to] = value.astype(np.float32)

    # Steps --------------------------------------------------------------------------------------------------------

    def embed(self, step: steps.Embed) -> None:
        self.put(step.to, self.matrix(step.matrix)[0][self.tokens] * np.float32(step.scale))

    def linear(self, step: steps.Linear) -> None:
        x = self.normal(self.buffers[step.src], step.norm)
        for output in step.outputs:
            part = x if output.begin is None else x[:, output.begin : output.begin + output.matrix.cols]
            self.put(output.to, self.product(part, output.matrix, output.bias, output.gain), add=output.add)

    def gated(self, step: steps.Gated) -> None:
        x = self.normal(self.buffers[step.src], step.norm)
        gate = activation(step.activation, self.product(x, step.gate, step.gate_bias))
        self.put(step.to, gate * self.product(x, step.up, step.up_bias))

    def gate(self, step: steps.Gate) -> None:
        self.put(step.to, activation(step.activation, self.buffers[step.gate]) * self.buffers[step.up])

    def attend(self, step: steps.Attend) -> None:
        store = self.stores[step.store]
        if step.k is not None and step.v is not None:
            k = self.heads(step.k, step.kv_heads, step.k_norm)
            v = self.heads(step.v, step.kv_heads, None)
            if store.spec.books is not None:  # codes are of unrotated keys
                k, v = through_codes(self.plan, store.spec, k, v, self.positions)
            k = self.rotated(k, step.rotary)
            for row, (sequence, position) in enumerate(zip(self.sequences, self.positions)):
                store.put(sequence, position, k[row], v[row])
        q = self.rotated(self.heads(step.q, step.heads, step.q_norm), step.rotary)
        out = np.zeros_like(q)
        for row, (sequence, position) in enumerate(zip(self.sequences, self.positions)):
            seen = store.seen(position, step.window)
            k, v = store.k[sequence][:, seen], store.v[sequence][:, seen]  # [H, slots, D]
            for head in range(step.heads):
                shared = head // (step.heads // step.kv_heads)
                scores = k[shared] @ q[row, head] * np.float32(step.scale)
                if step.softcap > 0:
                    scores = np.tanh(scores / np.float32(step.softcap)) * np.float32(step.softcap)
                out[row, head] = softmax(scores) @ v[shared]
        self.put(step.to, out.reshape(len(out), step.heads * step.dim))

    def heads(self, buffer: int, heads: int, norm: steps.Norm | None) -> np.ndarray:
        """A buffer as [N, heads, D], each head normalised."""
        x = self.buffers[buffer]
        return self.normal(x.reshape(len(x), heads, x.shape[1] // heads), norm)

    def rotated(self, x: np.ndarray, index: int | None) -> np.ndarray:
        """x [N, heads, D] turned by the rows' positions: channel i with channel i + half of those rotated."""
        if index is None:
            return x
        spec = self.plan.rotaries[index]
        angles = self.positions[:, None].astype(np.float32) * self.plan.tensors[spec.tensor]
        cos, sin = (np.float32(spec.gain) * turn(angles)[:, None, :] for turn in (np.cos, np.sin))
        half = angles.shape[1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def normalise(self, step: steps.Normalise) -> None:
        x = self.buffers[step.src]
        parts = self.normal(x.reshape(len(x), step.groups, x.shape[1] // step.groups), step.norm)
        self.put(step.to, parts.reshape(x.shape), add=step.add)

    def add(self, step: steps.Add) -> None:
        self.put(step.to, self.buffers[step.src], add=True)

    def clip(self, step: steps.Clip) -> None:
        self.put(step.buffer, self.buffers[step.buffer].clip(-step.bound, step.bound))

    def experts(self, step: steps.Experts) -> None:
        x = self.normal(self.buffers[step.src], step.norm)
        shares = softmax(self.product(x, step.router, step.router_bias))
        chosen = np.argsort(-shares, axis=-1, kind="stable")[:, : step.k]
        gate, up, down = (self.matrix(matrix) for matrix in (step.gate, step.up, step.down))
        out = np.zeros_like(self.buffers[step.to] if step.add else x)
        for row in range(len(x)):
            weights = shares[row, chosen[row]]
            if step.renormalize:
                weights = weights / weights.sum()
            for weight, expert in zip(weights, chosen[row]):
                hidden = activation(step.activation, gate[expert] @ x[row]) * (up[expert] @ x[row])
                out[row] += weight * (down[expert] @ hidden)
        self.put(step.to, out, add=step.add)

    def narrow(self, step: steps.Narrow) -> None:
        kept = {buffer: self.buffers[buffer][self.wanted] for buffer in step.buffers}
        # What is not named must not be read again: it is left without rows.
        self.buffers = [kept.get(index, np.zeros((0, width))) for index, width in enumerate(self.plan.widths)]
        self.sequences, self.positions = self.sequences[self.wanted], self.positions[self.wanted]
        self.wanted = np.arange(len(self.wanted))

    def head(self, step: steps.Head) -> None:
        x = self.normal(self.buffers[step.src][self.wanted], step.norm)
        scores = self.product(x, step.matrix, step.bias)
        if step.softcap > 0:
            scores = np.tanh(scores / np.float32(step.softcap)) * np.float32(step.softcap)
        self.scores = scores.astype(np.float32)

    def torch(self, step: steps.Torch) -> None:
        if self.module is None:
            raise ConfigError(
                f"{step.node} runs in torch: {step.reason}", hint="give the reference a way to run modules"
            )
        self.put(step.to, self.module(step.node, self.buffers[step.src], self.sequences, self.positions))


RUN: dict[type, Callable[..., None]] = {
    steps.Embed: Reference.embed,
    steps.Linear: Reference.linear,
    steps.Gated: Reference.gated,
    steps.Gate: Reference.gate,
    steps.Attend: Reference.attend,
    steps.Normalise: Reference.normalise,
    steps.Add: Reference.add,
    steps.Clip: Reference.clip,
    steps.Experts: Reference.experts,
    steps.Narrow: Reference.narrow,
    steps.Head: Reference.head,
    steps.Torch: Reference.torch,
}


class _Slots:
    """One layer's keys and values [S, H, L, D], rounded as the codec would."""

    def __init__(self, spec: steps.StoreSpec, sequences: int, length: int) -> None:
        self.spec = spec
        self.k = np.zeros((sequences, spec.heads, length, spec.dim), np.float32)
        self.v = np.zeros_like(self.k)

    def put(self, sequence: int, position: int, k: np.ndarray, v: np.ndarray) -> None:
        self.k[sequence, :, position] = _kept(k, self.spec.codec)
        self.v[sequence, :, position] = _kept(v, self.spec.codec)

    def seen(self, query: int, window: int) -> np.ndarray:
        """Positions that a query looks at: its past, inside the layer's window and what the policy keeps."""
        past = np.arange(query + 1)
        seen = past > query - window if window else np.ones_like(past, bool)
        if self.spec.keep:
            seen = seen & ((past > query - self.spec.keep) | (past < self.spec.sinks))
        return past[seen]


def _kept(x: np.ndarray, codec: str) -> np.ndarray:
    """x [H, D] after it was stored and read."""
    if codec in ("f32", "vq"):  # codes have been through theirs
        return x
    if codec == "bf16":  # the upper half of a float32, rounded half to even
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    safe = np.where(scale > 0, scale, 1)
    return (np.rint(x / safe) * scale).astype(np.float32)


def through_codes(
    plan: steps.Plan, spec: steps.StoreSpec, k: np.ndarray, v: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """k, v [N, heads, D] after they were coded and read, but for the tokens that stay as they are."""
    import torch

    from orchard.ops import vq

    books = spec.books
    assert books is not None
    heads, dim = spec.heads, spec.dim
    shapes = (
        (heads, books.key_rounds, books.key_words, dim),
        (heads, books.value_rounds, books.value_words, dim),
        *((heads, dim), (heads, dim), (heads, dim // 2), (heads, dim, dim)),
    )
    arrays = [torch.from_numpy(plan.tensors[name]).reshape(shape) for name, shape in zip(books.tensors, shapes)]
    made = vq.Codebooks(vq.paired(arrays[0]), *arrays[1:])
    keys, values = (torch.from_numpy(np.ascontiguousarray(x)).transpose(0, 1)[None] for x in (k, v))  # [1, H, N, D]
    coded = vq.decode_keys(made, *vq.encode_keys(made, keys)), vq.decode_values(made, *vq.encode_values(made, values))
    kept = (np.asarray(positions) < books.exact)[:, None, None]
    read = [x[0].transpose(0, 1).numpy() for x in coded]
    return np.where(kept, k, read[0]), np.where(kept, v, read[1])


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return (x / x.sum(-1, keepdims=True)).astype(np.float32)


def activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinite, and x / inf is the right 0
            return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))
    erf = np.vectorize(math.erf, otypes=[np.float32])
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))
