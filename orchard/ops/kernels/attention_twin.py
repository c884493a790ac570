"""The plain torch twin of the native attention kernels: what a store's bytes mean, and what attention over them gives.

Slow and simple on purpose; the tests hold every kernel against it. Layouts and rules are those of `native/kernels.h`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.context import KVView
from orchard.ops.attention import attend, visible

CODECS = ("f32", "bf16", "int8")
"""In the order of `Codec` in kernels.h."""
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_BLOCK = 16
"""Slots that lie side by side in a block of keys."""


@dataclass
class Store:
    """Keys and values of one layer and sequence, byte for byte as the kernels hold them."""

    codec: str
    heads: int
    dim: int
    capacity: int
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @property
    def width(self) -> int:
        return padded(self.dim)


@dataclass(frozen=True)
class Seen:
    """`Visible` of kernels.h. `positions` [capacity] int32, or None where slot s holds position s."""

    first: int
    last: int
    query: int
    positions: Tensor | None = None
    window: int = 0
    keep: int = 0
    sinks: int = 0


def padded(dim: int) -> int:
    return -(-dim // 32) * 32


def empty(codec: str, heads: int, dim: int, capacity: int) -> Store:
    """A store that nothing was written to."""
    if codec not in CODECS or capacity % 32:
        raise ValueError(f"no such store: {codec}, {capacity} slots")
    width, kind = padded(dim), _TYPES[codec]
    if codec == "f32":
        k = torch.zeros(heads, capacity // _BLOCK, width, _BLOCK, dtype=kind)
        v = torch.zeros(heads, capacity, width, dtype=kind)
    else:
        k = torch.zeros(heads, capacity // _BLOCK, width // 2, _BLOCK, 2, dtype=kind)
        v = torch.zeros(heads, capacity // 2, width, 2, dtype=kind)
    scales = torch.zeros(2, heads, capacity)
    return Store(codec, heads, dim, capacity, k, v, scales[0], scales[1])


def codes(x: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Elements as stored and the scale of each row: x ≈ scale * element."""
    if codec != "int8":
        return x.to(_TYPES[codec]), torch.ones(x.shape[:-1])
    most = x.abs().amax(-1)
    factor = torch.where(most > 0, 127 / most, 0.0)
    return (x * factor[..., None]).round().to(torch.int8), most / 127


def put(store: Store, head: int, slot: int, k: Tensor, v: Tensor) -> None:
    """Write one slot of one head: k, v are float32 [dim]."""
    (k_codes, k_scale), (v_codes, v_scale) = codes(k, store.codec), codes(v, store.codec)
    channel = torch.arange(store.dim)
    block, place = divmod(slot, _BLOCK)
    if store.codec == "f32":
        store.k[head, block, channel, place] = k_codes
        store.v[head, slot, channel] = v_codes
    else:
        store.k[head, block, channel // 2, place, channel % 2] = k_codes
        store.v[head, slot // 2, channel, slot % 2] = v_codes
    if store.codec == "int8":
        store.k_scale[head, slot], store.v_scale[head, slot] = k_scale, v_scale


def encode(codec: str, capacity: int, k: Tensor, v: Tensor) -> Store:
    """A store whose first slots hold k, v [heads, slots, dim] (float32)."""
    heads, slots, dim = k.shape
    store = empty(codec, heads, dim, capacity)
    padding = (0, store.width - dim, 0, capacity - slots)
    (k_codes, k_scale), (v_codes, v_scale) = codes(k, codec), codes(v, codec)
    k_codes, v_codes = (torch.nn.functional.pad(x, padding) for x in (k_codes, v_codes))
    k_blocks = k_codes.view(heads, capacity // _BLOCK, _BLOCK, store.width).transpose(2, 3)
    if codec == "f32":
        store.k.copy_(k_blocks)
        store.v.copy_(v_codes)
    else:
        store.k.copy_(k_blocks.unflatten(2, (store.width // 2, 2)).transpose(3, 4))
        store.v.copy_(v_codes.view(heads, capacity // 2, 2, store.width).transpose(2, 3))
    if codec == "int8":
        store.k_scale[:, :slots], store.v_scale[:, :slots] = k_scale, v_scale
    return store


def decode(store: Store) -> tuple[Tensor, Tensor]:
    """Keys and values as float32 [heads, capacity, dim]."""
    k, v = store.k.float(), store.v.float()
    if store.codec == "f32":
        k = k.transpose(2, 3).reshape(store.heads, store.capacity, store.width)
    else:
        k = k.transpose(3, 4).flatten(2, 3).transpose(2, 3).reshape(store.heads, store.capacity, store.width)
        v = v.transpose(2, 3).reshape(store.heads, store.capacity, store.width)
    if store.codec == "int8":
        k, v = k * store.k_scale[..., None], v * store.v_scale[..., None]
    return k[..., : store.dim], v[..., : store.dim]


def seen_by(queries: Tensor, seen: Seen, capacity: int) -> Tensor:
    """Bool [T, capacity]: the rule of `Visible`, for queries at positions [T]; it holds without `positions` too."""
    slots = torch.arange(capacity)
    positions = slots if seen.positions is None else seen.positions.long()
    valid = (slots >= seen.first) & (slots < seen.last) & (positions >= 0)
    nothing = torch.zeros(0)
    view = KVView(
        nothing, nothing, positions[None, None], valid[None, None], window=seen.keep or None, sinks=seen.sinks
    )
    return visible(queries[None], view, seen.window or None)[0, 0]


def part(store: Store, head: int, q: Tensor, scale: float, softcap: float, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
    """(out [count, dim], most [count], total [count]) of one query per head, q [count, dim], in double precision."""
    shown = seen_by(torch.tensor([seen.query]), seen, store.capacity)[0]
    k, v = (x[head, shown].double() for x in decode(store))
    scores = q.double() @ k.T * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if not shown.any():
        return (
            torch.zeros(q.shape, dtype=torch.double),
            scores.new_full((len(q),), -torch.inf),
            scores.new_zeros(len(q)),
        )
    most = scores.amax(-1)
    weights = torch.exp(scores - most[:, None])
    return weights @ v, most, weights.sum(-1)


def merge(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """One part out of parts over disjoint slots."""
    out, most, total = (torch.stack([p[i] for p in parts]) for i in range(3))
    top = most.amax(0)
    factor = torch.where(most == -torch.inf, 0.0, torch.exp(most - top))
    return (out * factor[..., None]).sum(0), top, (total * factor).sum(0)


def many(store: Store, head: int, q: Tensor, scale: float, softcap: float, seen: Seen) -> Tensor:
    """Normalised attention [T, count, dim] of queries q [T, count, dim] at positions seen.query and up, or zeros."""
    mask = seen_by(seen.query + torch.arange(len(q)), seen, store.capacity)
    shown = mask.any(0)
    mask = mask[:, shown]
    k, v = (x[head, shown].double() for x in decode(store))
    if mask.shape[1] == 0:
        return torch.zeros(q.shape, dtype=torch.double)
    lit = mask.any(1)
    out = attend(
        q.double().transpose(0, 1)[None],
        k[None, None],
        v[None, None],
        (mask | ~lit[:, None])[None, None],
        scale=scale,
        softcap=softcap or None,
    )
    return out[0].transpose(0, 1) * lit[:, None, None]
