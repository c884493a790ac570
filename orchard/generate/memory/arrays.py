"""What a store holds as plain arrays, and back: only slots that are in use, so that a file is as large as what it says."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orchard.cache.codecs import Parts
from orchard.cache.store import Store

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_arrays(store: Store, name: str) -> dict[str, np.ndarray]:
    """Positions [B, H, S] and every part [B, H, S, …] under names that begin with `name`; floats as the bits they are kept in."""
    upto = store.slots.reach(None)
    made = {f"{name}.positions": store.slots.positions[:, :, :upto].cpu().numpy().copy()}
    for role, parts in store.parts.items():
        for part, tensor in parts.items():
            held = store.slots.shown(tensor, upto).contiguous()
            bits = held.view(_BITS[held.element_size()]) if held.is_floating_point() else held
            made[f"{name}.{role}.{part}"] = bits.cpu().numpy().copy()
    for role, rows in ({} if store.exact is None else store.exact.rows).items():
        made[f"{name}.{role}.exact"] = rows.contiguous().view(_BITS[rows.element_size()]).cpu().numpy().copy()
    return made


def from_arrays(store: Store, arrays: dict[str, np.ndarray], name: str, capacity: int, length: int) -> None:
    """Fill an empty store. `ValueError` or `KeyError` where arrays are not what this store holds at `length` tokens."""
    positions = torch.from_numpy(np.ascontiguousarray(arrays[f"{name}.positions"]))
    counts = (positions >= 0).sum(-1, keepdim=True)
    first = length - counts
    place = torch.arange(positions.shape[-1])
    expected = torch.where(place < counts, first + place, -1)
    if positions.dtype != torch.long or positions.dim() != 3 or not positions.equal(expected) or int(first.min()) < 0:
        raise ValueError(f"the positions of layer {name} are not in order")
    device = store.slots.positions.device
    if int(counts.sum(1).amax()) > capacity * positions.shape[1]:
        raise ValueError(f"layer {name} holds more than its budget")
    held: dict[str, Parts] = {
        role: {
            part: _tensor(arrays[f"{name}.{role}.{part}"], tensor, positions.shape).to(device)
            for part, tensor in parts.items()
        }
        for role, parts in store.parts.items()
    }
    rows = {} if store.exact is None else store.exact.rows
    exact = {
        role: _tensor(arrays[f"{name}.{role}.exact"], each, each.shape[:3]).to(device) for role, each in rows.items()
    }
    store.fill(held, positions.to(device), capacity)
    if store.exact is not None:
        store.exact.rows = exact


def _tensor(array: np.ndarray, like: Tensor, held: torch.Size) -> Tensor:
    bits = torch.from_numpy(np.ascontiguousarray(array))
    want = _BITS[like.element_size()] if like.is_floating_point() else like.dtype
    if bits.dtype != want or bits.shape != (*held, *like.shape[3:]) or held[:2] != like.shape[:2]:
        raise ValueError(f"an array of {tuple(bits.shape)} {bits.dtype} where slots are kept as {like.dtype}")
    return bits.view(like.dtype) if like.is_floating_point() else bits
