"""Weights of a plan as a GPU reads them: rows one after another, codes of one group joined into 32-bit words.

The bytes of the CPU layout (`orchard/ops/kernels/packing.py`) are brought to the device as they are and put in order there,
which moves bits and changes no value. In a group of G columns with codes of b bits there are W = G·b/32 words; code j of
word w stands for column j·W + w of the group. So one shift of neighbouring words gives codes of neighbouring columns, which is
what a kernel wants to multiply with a run of its input, and no word spans two scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orchard.core.errors import UnsupportedPair
from orchard.ops.kernels.packing import BITS, BLOCK, unpack_plain, zero_code
from orchard.ops.plan.steps import Matrix

_DENSE = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, cols]: `data` is dense, or int32 words [rows, words] with `scales` (and `minima`) [rows, groups]."""

    kind: str
    rows: int
    cols: int
    data: Tensor
    group: int = 1
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a code; 0: dense."""
        return BITS.get(self.kind, 0)

    @property
    def zero(self) -> float:
        """The code that stands for zero (or for the minimum)."""
        return zero_code(self.kind, self.minima is not None) if self.bits else 0.0

    @property
    def nbytes(self) -> int:
        tables = (self.data, self.scales, self.minima)
        return sum(table.numel() * table.element_size() for table in tables if table is not None)

    def codes(self) -> Tensor:
        """uint8 [rows, groups, group]: padding included."""
        words = self.data.view(self.rows, -1, 1, self.group * self.bits // 32)
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device)[:, None]
        return ((words >> shifts) & (2**self.bits - 1)).to(torch.uint8).flatten(2)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What it stands for, [rows, cols]: scale · (code - zero) + minimum."""
        if not self.bits:
            return self.data.to(dtype)
        assert self.scales is not None
        values = (self.codes().float() - self.zero) * self.scales.float()[..., None]
        if self.minima is not None:
            values = values + self.minima.float()[..., None]
        return values.flatten(1)[:, : self.cols].to(dtype)

    def at(self, rows: Tensor) -> Tensor:
        """Some rows, dense float32."""
        pick = Weight(
            kind=self.kind,
            rows=len(rows),
            cols=self.cols,
            data=self.data[rows],
            group=self.group,
            scales=None if self.scales is None else self.scales[rows],
            minima=None if self.minima is None else self.minima[rows],
        )
        return pick.dense()


def bring(matrix: Matrix, data: np.ndarray, device: torch.device) -> Weight:
    """A packed matrix of a plan on a device."""
    if matrix.count != 1:
        raise UnsupportedPair(
            f"{matrix.tensor}: {matrix.count} matrices in one (experts) have no form on a GPU",
            hint="run this model on the CPU, or with a named dtype in torch",
        )
    if matrix.kind not in _DENSE and matrix.kind not in BITS and matrix.kind != "f16":
        raise UnsupportedPair(
            f"{matrix.tensor}: weights of the kind {matrix.kind!r} have no form on a GPU",
            hint="run this model on the CPU, or with a named dtype in torch",
        )
    # A file that is mapped cannot be written to, and torch warns of that: it is only read here.
    raw = torch.from_numpy(data if data.flags.writeable else data.copy()).to(device)
    if matrix.kind == "f16":  # side paths: small, and float32 holds them exactly
        return dense(torch.from_numpy(unpack_plain(data, "f16", matrix.rows, matrix.cols)).to(device), "f32")
    if matrix.kind in _DENSE:
        return dense(_plain(raw, matrix), matrix.kind)
    bits, groups = BITS[matrix.kind], -(-matrix.cols // matrix.group)
    parts = raw.view(-(-matrix.rows // BLOCK), groups, -1)
    header = 128 if matrix.minimum else 64
    # Words of the CPU layout: byte i of word w, shifted by j·bits, is column w·32/bits + 4·j + i of its group.
    count = 8 // bits
    lanes = parts[:, :, header:].reshape(len(parts), groups, -1, BLOCK, 4).permute(0, 3, 1, 2, 4)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=device)[:, None]
    codes = (lanes[..., None, :] >> shifts[:count]) & (2**bits - 1)
    codes = codes.reshape(len(parts) * BLOCK, groups, matrix.group)[: matrix.rows]
    scales = _table(parts[:, :, :64], matrix.rows)
    minima = _table(parts[:, :, 64:128], matrix.rows) if matrix.minimum else None
    return quantised(codes, scales, minima, kind=matrix.kind, cols=matrix.cols)


def widened(matrix: Matrix, data: np.ndarray, begin: int, width: int, device: torch.device) -> Weight:
    """A matrix of plain numbers that reads only a part of its input, with zeros for the rest."""
    values = torch.zeros(matrix.rows, width)
    values[:, begin : begin + matrix.cols] = torch.from_numpy(unpack_plain(data, matrix.kind, matrix.rows, matrix.cols))
    return dense(values.to(device), "f32")


def dense(values: Tensor, kind: str) -> Weight:
    """Values [rows, cols] that are there already."""
    rows, cols = values.shape
    return Weight(kind, rows, cols, values.to(_DENSE[kind]).contiguous())


def quantised(codes: Tensor, scales: Tensor, minima: Tensor | None, *, kind: str, cols: int) -> Weight:
    """uint8 codes [rows, groups, group] with scales (and minima) [rows, groups] → words."""
    bits = BITS[kind]
    rows, _, group = codes.shape
    parts = codes.view(rows, -1, 32 // bits, group * bits // 32)
    words = torch.zeros(rows, parts.shape[1], parts.shape[3], dtype=torch.int32, device=codes.device)
    for place in range(32 // bits):
        words |= parts[:, :, place].int() << (place * bits)
    return Weight(kind, rows, cols, words.flatten(1), group, scales, minima)


def rounded(values: Tensor, kind: str, group: int) -> Weight:
    """Dense values [rows, cols] rounded to codes, one scale for the largest of each group: for weights made on the device."""
    bits, (rows, cols) = BITS[kind], values.shape
    zero = zero_code(kind, False)
    parts = torch.nn.functional.pad(values.float(), (0, -cols % group)).view(rows, -1, group)
    scales = (parts.abs().amax(-1) / (2**bits - 1 - zero)).half()
    safe = scales.float().clamp(min=1e-8)
    codes = (parts / safe[..., None] + zero).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return quantised(codes, scales, None, kind=kind, cols=cols)


def joined(weights: Sequence[Weight]) -> Weight:
    """One matrix above another, so that one launch serves all. They must be `alike`."""
    first = weights[0]
    if len(weights) == 1:
        return first
    return Weight(
        kind=first.kind,
        rows=sum(weight.rows for weight in weights),
        cols=first.cols,
        data=torch.cat([weight.data for weight in weights]),
        group=first.group,
        scales=None if first.scales is None else torch.cat([w.scales for w in weights if w.scales is not None]),
        minima=None if first.minima is None else torch.cat([w.minima for w in weights if w.minima is not None]),
    )


def alike(weights: Sequence[Weight]) -> bool:
    """Whether they can be joined."""
    return len({(w.kind, w.cols, w.group, w.minima is None) for w in weights}) == 1


def _plain(raw: Tensor, matrix: Matrix) -> Tensor:
    width = matrix.cols if matrix.kind == "f32" else -(-matrix.cols // 2)
    blocks = raw.view(torch.int32).view(-1, width, BLOCK)
    words = torch.empty(len(blocks), BLOCK, width, dtype=torch.int32, device=raw.device)
    words.copy_(blocks.transpose(1, 2))
    values = words.view(_DENSE[matrix.kind]).flatten(0, 1)
    return values[: matrix.rows, : matrix.cols]


def _table(part: Tensor, rows: int) -> Tensor:
    """Bytes [blocks, groups, 64] → float16 [rows, groups]."""
    table = part.contiguous().view(torch.float16)
    return table.transpose(1, 2).reshape(-1, part.shape[1])[:rows].contiguous()
