"""What modules say about themselves when a plan is made: values and what is done to them, one node after another.

A module's `lower(builder, x, path)` calls these methods and returns the `Value` of its result. Nothing is fused and no
buffers are chosen here (`fuse` does both), so a module says plainly what it computes. Every value is written once.
Tensors are named after the module they come from, so that a plan and its file can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from orchard.core.errors import ConfigError
from orchard.ops.plan.codes import MOST_ROUNDS, WIDEST, Books, BooksSpec, spec_of
from orchard.ops.plan.steps import ACTIVATIONS, CODECS, ENDLESS, Matrix, Norm, RotarySpec, StoreSpec


class NoStep(ConfigError):
    """No step of a plan does this: the module that asks has to run in torch."""

    code = "no-step"


class Packed(Protocol):
    """A weight in the layout of the native kernels; `orchard.nn.formats.base.NativeWeight` is one."""

    @property
    def kind(self) -> str: ...

    @property
    def group(self) -> int: ...

    @property
    def minimum(self) -> bool: ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def data(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Value:
    """A table with one row per token, known by its number."""

    number: int
    width: int


@dataclass(frozen=True)
class Node:
    """One thing done: values in, one value out (-1 where there is none)."""

    kind: str
    inputs: tuple[int, ...]
    out: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Rotation:
    """Inverse frequencies float32 [rotated / 2] and the gain on rotated vectors."""

    frequencies: np.ndarray
    gain: float = 1.0


Mark = tuple[int, ...]


class Builder:
    """Collects nodes, tensors, stores and rotary tables."""

    def __init__(self, *, context: int, stores: str = "bf16") -> None:
        """`stores`: how slots are kept that a model keeps as they come."""
        if stores not in ("bf16", "f32"):
            raise ConfigError(f"stores cannot be kept as {stores!r}", hint="use 'bf16' or 'f32'")
        self.context = context
        self.nodes: list[Node] = []
        self.widths: list[int] = []
        """Of every value, by number."""
        self.tensors: dict[str, np.ndarray] = {}
        self.stores: list[StoreSpec] = []
        self.rotaries: list[RotarySpec] = []
        self.in_torch: dict[int, str] = {}
        """Layers whose stores live in torch, and why: everything that shares such a store has to run there too."""
        self._plain = stores

    # Going back ---------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        return len(self.nodes), len(self.widths), len(self.tensors), len(self.stores), len(self.rotaries)

    def rewind(self, mark: Mark) -> None:
        """Forget all that was said after `mark`: for a module that found out half-way that it cannot be lowered."""
        nodes, widths, tensors, stores, rotaries = mark
        del self.nodes[nodes:], self.widths[widths:], self.stores[stores:], self.rotaries[rotaries:]
        for name in list(self.tensors)[tensors:]:
            del self.tensors[name]

    # What is done to values ---------------------------------------------------------------------------------------

    def embed(self, weight: Packed, scale: float = 1.0, *, path: str) -> Value:
        return self._node("embed", (), weight.cols, matrix=self._matrix(path, weight), scale=float(scale))

    def norm(self, x: Value, weight: np.ndarray, eps: float, groups: int = 1, *, path: str) -> Value:
        """x / rms(x) · weight over each of `groups` equal parts of a row; the weight is as long as one part."""
        if len(weight) * groups != x.width:
            raise ConfigError(f"{path}: a norm of {groups} × {len(weight)} on {x.width} values", hint="make them equal")
        return self._node("norm", (x,), x.width, norm=self.norm_of(weight, eps, path=path), groups=groups)

    def linear(
        self, x: Value, weight: Packed, bias: np.ndarray | None = None, gain: np.ndarray | None = None, *, path: str
    ) -> Value:
        """gain · (weight x) + bias; gain and bias are a number for each row, or None."""
        if weight.cols != x.width or weight.count != 1:
            shape = f"{weight.count} × [{weight.rows}, {weight.cols}]"
            raise ConfigError(f"{path}: a weight {shape} on {x.width} values", hint="make them equal")
        matrix = self._matrix(path, weight)
        factors = self._vector(f"{path}.lora.gain", gain, weight.rows)  # only adapters have one
        bias_name = self._bias(path, bias, weight.rows)
        return self._node("linear", (x,), weight.rows, matrix=matrix, bias=bias_name, gain=factors)

    def gate(self, gate: Value, up: Value, activation: str) -> Value:
        """act(gate) · up."""
        if gate.width != up.width:
            raise ConfigError(f"a gate of {gate.width} on {up.width} values", hint="make them equal")
        _known(activation)
        return self._node("gate", (gate, up), gate.width, activation=activation)

    def add(self, x: Value, y: Value) -> Value:
        if x.width != y.width:
            raise ConfigError(f"{x.width} and {y.width} values cannot be added", hint="make them equal")
        return self._node("add", (x, y), x.width)

    def clip(self, x: Value, bound: float) -> Value:
        return self._node("clip", (x,), x.width, bound=float(bound))

    def attend(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        *,
        layer: int,
        owner: int | None,
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rotary: Rotation | None = None,
        softcap: float | None = None,
        window: int | None = None,
        codec: str = "plain",
        keep: int = 0,
        sinks: int = 0,
        books: Books | None = None,
    ) -> Value:
        """Keep `k` and `v` in the layer's store and attend, or read the store of `owner`; norms are over each head. `books`: of a
        store of codes ("vq")."""
        sides = () if k is None or v is None else (k, v)
        kept = codec if codec != "plain" else self._plain
        if owner is None:
            if not sides or kept not in CODECS:
                raise NoStep(f"layer {layer} has no keys and values, or no codec {codec!r}", hint="use a known one")
            store = len(self.stores)
            keep, sinks = min(keep, ENDLESS), min(sinks, ENDLESS)
            coded = None if books is None else self._books(books, layer, dim, rotary)
            self.stores.append(
                StoreSpec(layer=layer, heads=kv_heads, dim=dim, codec=kept, keep=keep, sinks=sinks, books=coded)
            )
        else:
            sides, store = (), self._store_of(owner)
        return self._node(
            "attend",
            (q, *sides),
            heads * dim,
            store=store,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scale=float(scale),
            softcap=float(softcap or 0.0),
            window=min(window or 0, ENDLESS),
            rotary=None if rotary is None else self._rotary(rotary),
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def experts(
        self,
        x: Value,
        *,
        router: Packed,
        gate: Packed,
        up: Packed,
        down: Packed,
        k: int,
        renormalize: bool,
        activation: str,
        router_bias: np.ndarray | None = None,
        router_path: str,
        path: str,
    ) -> Value:
        """The k best of several gated MLPs, chosen for each row by a softmax router."""
        _known(activation)
        parts = {
            name: self._matrix(f"{path}.{name}", part) for name, part in (("gate", gate), ("up", up), ("down", down))
        }
        return self._node(
            "experts",
            (x,),
            down.rows,
            router=self._matrix(router_path, router),
            router_bias=self._bias(router_path, router_bias, router.rows),
            k=k,
            renormalize=renormalize,
            activation=activation,
            **parts,
        )

    def low_rank(
        self, x: Value, a: np.ndarray, b: np.ndarray, scale: float | np.ndarray, onto: Value, *, path: str
    ) -> Value:
        """onto + scale · b (a x): the side path of an adapter. a: [rank, in], b: [out, rank]; a scale for all rows, or one for
        each. Kept in half precision where that changes no number, else in float32."""
        narrow = self.linear(x, side_matrix(a), path=f"{path}.a")
        # Where several side paths read one value, `fuse` joins these.
        self.nodes[-1] = replace(self.nodes[-1], fields={**self.nodes[-1].fields, "ranks": np.asarray(a, np.float32)})
        factor = np.asarray(scale, np.float32).reshape(-1, 1)
        wide = self.linear(narrow, side_matrix(np.asarray(b, np.float32) * factor), path=f"{path}.b")
        return self.add(onto, wide)

    def torch(self, node: str, x: Value, reason: str, width: int | None = None) -> Value:
        """The module at path `node`, run in torch. `width`: of its result, where it is not that of `x`."""
        return self._node("torch", (x,), width or x.width, node=node, reason=reason)

    def head(
        self, x: Value, weight: Packed, bias: np.ndarray | None = None, softcap: float | None = None, *, path: str
    ) -> None:
        """Scores. `path` may be that of the embedding, whose table then serves both ways."""
        matrix = self._matrix(path, weight)
        bias_name = self._bias(path, bias, weight.rows)
        node = Node("head", (x.number,), -1, {"matrix": matrix, "bias": bias_name, "softcap": float(softcap or 0.0)})
        self.nodes.append(node)

    # Parts of nodes -----------------------------------------------------------------------------------------------

    def norm_of(self, weight: np.ndarray, eps: float, *, path: str) -> Norm:
        """A norm that is part of something else (queries and keys)."""
        return Norm(self._tensor(f"{path}.weight", np.ascontiguousarray(weight, np.float32)), float(eps))

    def _books(self, books: Books, layer: int, dim: int, rotary: Rotation | None) -> BooksSpec:
        if rotary is not None and 2 * len(rotary.frequencies) != dim:
            raise NoStep(f"layer {layer} rotates a part of its keys, and codes all of them", hint="it runs in torch")
        if dim > WIDEST or max(books.keys.shape[1], books.values.shape[1]) > MOST_ROUNDS:
            raise NoStep(
                f"layer {layer} has wider heads or more rounds than codes have room for", hint="it runs in torch"
            )
        return spec_of(books, f"codebooks.{layer}", self._tensor)

    def _store_of(self, owner: int) -> int:
        for index, spec in enumerate(self.stores):
            if spec.layer == owner:
                return index
        raise NoStep(f"layer {owner}, whose store is read, has no native one", hint="the layer runs in torch too")

    def _node(self, kind: str, inputs: tuple[Value, ...], width: int, **fields: Any) -> Value:
        value = Value(len(self.widths), width)
        self.widths.append(width)
        self.nodes.append(Node(kind, tuple(x.number for x in inputs), value.number, fields))
        return value

    def _matrix(self, path: str, weight: Packed) -> Matrix:
        name = self._tensor(f"{path}.weight", weight.data)
        return Matrix(
            tensor=name,
            kind=weight.kind,
            rows=weight.rows,
            cols=weight.cols,
            group=weight.group,
            minimum=weight.minimum,
            count=weight.count,
        )

    def _bias(self, path: str, bias: np.ndarray | None, rows: int) -> str | None:
        return self._vector(f"{path}.bias", bias, rows)

    def _vector(self, name: str, values: np.ndarray | None, rows: int) -> str | None:
        if values is None:
            return None
        if values.shape != (rows,):
            path, _, what = name.rpartition(".")
            raise ConfigError(f"{path}: a {what} of shape {values.shape} for {rows} rows", hint="make them equal")
        return self._tensor(name, np.ascontiguousarray(values, np.float32))

    def _rotary(self, rotation: Rotation) -> int:
        """Equal tables are kept once: most models have one for all their layers."""
        table = np.ascontiguousarray(rotation.frequencies, np.float32)
        for index, spec in enumerate(self.rotaries):
            if spec.gain == rotation.gain and np.array_equal(self.tensors[spec.tensor], table):
                return index
        name = self._tensor(f"rotary.{len(self.rotaries)}", table)
        self.rotaries.append(RotarySpec(name, float(rotation.gain)))
        return len(self.rotaries) - 1

    def _tensor(self, name: str, value: np.ndarray) -> str:
        old = self.tensors.setdefault(name, value)
        if old is not value and not np.array_equal(old, value):
            raise ConfigError(f"two different tensors are called {name!r}", hint="give modules paths of their own")
        return name


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise NoStep(f"the activation {activation!r} has no native form", hint="use one of " + ", ".join(ACTIVATIONS))


@dataclass(frozen=True)
class _Float:
    """A float32 matrix in the kernels' layout."""

    rows: int
    cols: int
    data: np.ndarray
    kind: str = "f32"
    group: int = 1
    minimum: bool = False
    count: int = 1


def _float_matrix(values: np.ndarray, kind: str = "f32") -> Packed:
    from orchard.ops.kernels import packing

    rows, cols = values.shape
    return _Float(rows, cols, packing.pack_plain(np.ascontiguousarray(values, np.float32), kind), kind)


def side_matrix(values: np.ndarray) -> Packed:
    """A matrix of a side path: in half precision where it is made of such numbers."""
    values = np.asarray(values, np.float32)
    with np.errstate(over="ignore"):
        half = np.array_equal(values.astype(np.float16).astype(np.float32), values)
    return _float_matrix(values, "f16" if half else "f32")
