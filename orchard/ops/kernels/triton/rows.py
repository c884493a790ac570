"""What a call is made of, on the device: its rows, and the paged stores that they read and write.

A row is one token. Keys and values of a layer lie in pages of 64 slots; a table says which page holds which part of which
sequence, the same for all layers. Slot s of a sequence holds position s: windows and rings are masks on what is read.
Rows are put together into tiles of one sequence, so that a page is read once for several of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orchard.ops.plan.steps import Attend, StoreSpec

PAGE = 64
"""Tokens of a page."""
TILE = 16
"""Rows of a tile where many rows of a sequence come together."""
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Rows:
    """Tokens, their sequences and positions, int32 [R]; and tiles: where each begins and how many rows it has, int32 [T]."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    firsts: Tensor
    counts: Tensor
    tile: int
    """At most so many rows in a tile."""
    splits: int = 1
    """Parts that the context of each tile is cut into."""
    apart: bool = False
    """Whether no two rows are of one sequence."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Pages:
    """One layer's keys and values [pages, heads, PAGE, dim], with scales [pages, heads, PAGE] where they are 8-bit codes."""

    spec: StoreSpec
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor
    """int32 [slots, pages of the longest]; shared by all layers. Page 0 is where rows go that only fill a batch."""


@dataclass(frozen=True)
class Heads:
    """The parts of an `Attend` step that kernels need, with its tensors on the device."""

    step: Attend
    turns: Tensor | None = None
    """float32 [positions, 2, pairs]: cosine and sine of every position, from `turns_of`."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def rotated(self) -> int:
        """Pairs of channels that turn."""
        return 0 if self.turns is None else self.turns.shape[2]

    def reach(self, spec: StoreSpec) -> int:
        """How far back a query looks at most; 0: to the beginning."""
        kept = 0 if spec.sinks else spec.keep  # sinks are at the beginning
        return min((size for size in (self.step.window, kept) if size), default=0)


def turns_of(frequencies: Tensor, gain: float, positions: int) -> Tensor:
    """How far each pair of channels turns at each position: a table, because working out a cosine takes a kernel longer than
    everything else that it does for one token."""
    places = torch.arange(positions, dtype=torch.float32, device=frequencies.device)
    angles = places[:, None] * frequencies
    return gain * torch.stack([angles.cos(), angles.sin()], dim=1)


def make_pages(spec: StoreSpec, pages: int, table: Tensor) -> Pages:
    """Empty pages on the device of the table. Zeros, because a masked slot is multiplied by a weight of zero."""
    shape, device = (pages, spec.heads, PAGE), table.device
    k, v = (torch.zeros(*shape, spec.dim, dtype=_TYPES[spec.codec], device=device) for _ in range(2))
    if spec.codec != "int8":
        return Pages(spec, k, v, None, None, table)
    scales = [torch.zeros(shape, device=device) for _ in range(2)]
    return Pages(spec, k, v, scales[0], scales[1], table)


def page_bytes(spec: StoreSpec) -> int:
    """Of one page of one layer."""
    each = 2 * spec.heads * PAGE
    return each * (spec.dim + 4) if spec.codec == "int8" else each * spec.dim * _TYPES[spec.codec].itemsize


def tiles_of(slots: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Where tiles of rows of one sequence begin, and their rows. The rows of a sequence lie together."""
    if tile == 1:
        return np.arange(len(slots), dtype=np.int32), np.ones(len(slots), np.int32)
    starts = np.flatnonzero(np.r_[True, slots[1:] != slots[:-1]])
    ends = np.r_[starts[1:], len(slots)]
    firsts = np.concatenate([np.arange(start, end, tile) for start, end in zip(starts, ends)])
    stops = np.minimum(firsts + tile, ends[np.searchsorted(starts, firsts, side="right") - 1])
    return firsts.astype(np.int32), (stops - firsts).astype(np.int32)
