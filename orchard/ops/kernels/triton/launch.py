"""The Triton kernels behind the same functions as their torch twin (`twin`): which kernel, with what tiles.

Few rows go through `one_row`, each by itself; some, where weights are dense, through `some_rows`; and many through the matrix
product of torch, for which codes are unpacked to bfloat16 first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from orchard.ops.kernels.triton import attention_kernels, linear_kernels, row_kernels
from orchard.ops.kernels.triton.rows import PAGE, Heads, Pages, Rows
from orchard.ops.kernels.triton.twin import NormOf
from orchard.ops.kernels.triton.weights import Weight

ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
EARLY = os.environ.get("ORCHARD_CUDA_EARLY", "1") != "0"
"""Whether kernels may begin early where the device can do that."""
FEW = 4
"""Up to so many rows are multiplied one by one, in float32, as if each were alone."""
SOME = 64
"""More rows than these go through torch's own matrix product, and codes as soon as there are more than a few."""
# Triton's interpreter has no matrix products of bfloat16: there, everything is float32.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _early(wanted: bool = True) -> dict[str, bool]:
    """From compute capability 9.0 a kernel can begin while the one before it ends (programmatic dependent launch). That pays
    where kernels are short and wait for memory, and not where they compute."""
    can = wanted and EARLY and not _INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def embed(tokens: Tensor, table: Weight, out: Tensor, scale: float) -> None:
    block = min(1024, triton.next_power_of_2(table.cols))
    row_kernels.table_rows[(len(tokens), triton.cdiv(table.cols, block))](
        tokens,
        table.data,
        *_tables(table),
        out,
        table.cols,
        scale,
        BITS=table.bits,
        GROUP=table.group,
        ZERO=table.zero,
        MINIMUM=table.minima is not None,
        BK=block,
        **_early(len(tokens) <= FEW),
    )


def linear(
    x: Tensor,
    weight: Weight,
    outs: Sequence[Tensor],
    *,
    norm: NormOf | None = None,
    bias: Tensor | None = None,
    add: bool = False,
    activation: str | None = None,
) -> None:
    """Rows x [M, K] times a matrix into `outs`, side by side; with an activation: the matrix is gate above up."""
    if len(x) > (FEW if weight.bits else SOME):
        _many(x, weight, outs, norm, bias, add, activation)
        return
    last = outs[-1]
    out0, out1, out2 = (*outs, last, last)[:3]
    rows = weight.rows if activation is None else weight.rows // 2
    n0 = outs[0].shape[1]
    n1 = n0 + outs[1].shape[1] if len(outs) > 2 else rows
    sides = (bias if bias is not None else weight.data, norm[0] if norm is not None else weight.data)
    lines = (x.stride(0), out0.stride(0), out1.stride(0), out2.stride(0))
    eps = norm[1] if norm is not None else 0.0
    facts: dict[str, Any] = {
        "NORM": norm is not None,
        "BIAS": bias is not None,
        "ADD": add,
        "GATED": 0 if activation is None else ACTIVATIONS[activation],
        **_early(len(x) <= FEW),
    }
    if len(x) <= FEW:
        tile = one_row_tile(weight, activation is not None)
        facts |= {"BITS": weight.bits, "GROUP": weight.group, "ZERO": weight.zero, "MINIMUM": weight.minima is not None}
        tables = (weight.data, *_tables(weight), *sides, out0, out1, out2, n0, n1)
        linear_kernels.one_row[(triton.cdiv(rows, tile["BN"]), len(x))](
            x, *tables, *lines, rows, weight.cols, eps, **facts, **tile
        )
        return
    tile = some_rows_tile(weight, rows, len(x))
    grid = (triton.cdiv(rows, tile["BN"]), triton.cdiv(len(x), tile["BM"]))
    half = weight.kind != "f32" and not _INTERPRETED
    places = (weight.data, *sides, out0, out1, out2, n0, n1)
    linear_kernels.some_rows[grid](x, *places, *lines, len(x), rows, weight.cols, eps, **facts, HALF=half, **tile)


def one_row_tile(weight: Weight, gated: bool) -> dict[str, int]:
    """Few rows of the matrix in a program, so that there are many programs, and long runs of each row. Where a matrix has rows
    enough for all, small programs of more rows are quicker; a long row wants more of it at once. For codes some more rows: what
    is done to the input is done once for all of them. Measured on an H200."""
    tall, half = weight.rows >= 8192, 2 if gated else 1
    if weight.bits:
        words = weight.data.shape[1]
        if tall:
            rows, run, warps = (16, 64, 2) if gated else (8, 128, 1)
        else:
            rows, run, warps = (4, 256, 2) if weight.rows >= 3072 and words >= 256 else (8, 256, 8)
        return {"BN": rows // half, "BK": _run(words, run), "STAGES": 1, "num_warps": warps}
    if tall:
        rows, run, warps = 8, 512, 1
    elif weight.cols >= 2048:
        rows, run, warps = (8, 1024, 4) if weight.rows >= 3072 else (4, 2048, 4)
    else:
        rows, run, warps = 4, 1024, 4
    return {"BN": rows // half, "BK": _run(weight.cols, run), "STAGES": 1, "num_warps": warps}


def some_rows_tile(weight: Weight, rows: int, count: int) -> dict[str, int]:
    lines = max(16, min(64, triton.next_power_of_2(count)))
    columns = 32 if weight.kind == "f32" else 128 if lines <= 32 else 64
    tall = 16 if rows <= 2304 else 32 if rows <= 4096 else 64
    return {"BN": tall, "BM": lines, "BK": columns, "STAGES": 4, "num_warps": 4}


def normalise(x: Tensor, out: Tensor, norm: NormOf, groups: int, add: bool) -> None:
    width = x.shape[1] // groups
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    row_kernels.norm_parts[(len(x) * groups,)](
        x, norm[0], out, width, norm[1], ADD=add, BD=block, num_warps=warps, **_early()
    )


def gate(gates: Tensor, ups: Tensor, out: Tensor, activation: str) -> None:
    width = out.shape[1]
    row_kernels.gate_rows[(len(out), triton.cdiv(width, 1024))](
        gates, ups, out, gates.stride(0), width, GATED=ACTIVATIONS[activation], BN=1024, **_early(len(out) <= FEW)
    )


def keep_and_attend(
    q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, rows: Rows, heads: Heads, pages: Pages
) -> None:
    """All of an attention step: in one kernel where rows do not see each other, and pages hold plain numbers."""
    if rows.apart and pages.k_scale is None:
        _attend_new(q, k, v, out, rows, heads, pages)
        return
    keep(q, k, v, rows, heads, pages)
    attend(q, out, rows, heads, pages)


def keep(q: Tensor, k: Tensor | None, v: Tensor | None, rows: Rows, heads: Heads, pages: Pages) -> None:
    """Normalise and turn queries in place; normalise, turn and keep keys; keep values."""
    step = heads.step
    kv = step.kv_heads if k is not None else 0
    attention_kernels.keep_rows[(len(q), step.heads + kv)](
        q,
        k if k is not None else q,
        v if v is not None else q,
        *_kept(pages),
        pages.table,
        rows.slots,
        rows.positions,
        _or(heads.turns, q),
        _or(heads.q_norm, q),
        _or(heads.k_norm, q),
        pages.table.shape[1],
        step.q_norm.eps if step.q_norm else 0.0,
        step.k_norm.eps if step.k_norm else 0.0,
        HEADS=step.heads,
        KV=step.kv_heads,
        DIM=step.dim,
        HALF=heads.rotated,
        Q_NORM=heads.q_norm is not None,
        K_NORM=heads.k_norm is not None,
        CODES=pages.k_scale is not None,
        PAGE=PAGE,
        WIDTH=triton.next_power_of_2(step.dim),
        num_warps=1,
        **_early(len(q) <= FEW),
    )


def attend(q: Tensor, out: Tensor, rows: Rows, heads: Heads, pages: Pages) -> None:
    """Attention of every row over its sequence's pages."""
    step, spec, splits = heads.step, pages.spec, rows.splits
    width = max(16, triton.next_power_of_2(step.dim))
    parts = _parts(q, step.heads * splits, step.dim, splits)
    lines = max(16, triton.next_power_of_2(rows.tile * (step.heads // step.kv_heads)))
    attention_kernels.attend_tiles[(len(rows.firsts), step.kv_heads, splits)](
        q,
        out,
        *parts,
        *_kept(pages),
        pages.table,
        rows.slots,
        rows.positions,
        rows.firsts,
        rows.counts,
        pages.table.shape[1],
        step.scale,
        step.softcap,
        HEADS=step.heads,
        KV=step.kv_heads,
        DIM=step.dim,
        REACH=heads.reach(spec),
        WINDOW=step.window,
        KEEP=spec.keep,
        SINKS=spec.sinks,
        CAPPED=step.softcap > 0,
        CODES=pages.k_scale is not None,
        FULL=spec.codec == "f32" or _INTERPRETED,
        PAGE=PAGE,
        LINES=lines,
        WIDTH=width,
        SPLITS=splits,
        STAGES=2,
        num_warps=4,
        **_early(len(q) <= FEW),
    )
    _merge(parts, out, len(q) * step.heads, step.dim, splits)


def _attend_new(
    q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, rows: Rows, heads: Heads, pages: Pages
) -> None:
    step, spec, splits = heads.step, pages.spec, rows.splits
    parts = _parts(q, step.heads * splits, step.dim, splits)
    attention_kernels.attend_new[(len(q), step.kv_heads, splits)](
        q,
        _or(k, q),
        _or(v, q),
        out,
        *parts,
        pages.k,
        pages.v,
        pages.table,
        rows.slots,
        rows.positions,
        _or(heads.turns, q),
        _or(heads.q_norm, q),
        _or(heads.k_norm, q),
        pages.table.shape[1],
        step.q_norm.eps if step.q_norm else 0.0,
        step.k_norm.eps if step.k_norm else 0.0,
        step.scale,
        step.softcap,
        HEADS=step.heads,
        KV=step.kv_heads,
        DIM=step.dim,
        HALF=heads.rotated,
        Q_NORM=heads.q_norm is not None,
        K_NORM=heads.k_norm is not None,
        OWN=k is not None,
        REACH=heads.reach(spec),
        WINDOW=step.window,
        KEEP=spec.keep,
        SINKS=spec.sinks,
        CAPPED=step.softcap > 0,
        FULL=spec.codec == "f32" or _INTERPRETED,
        PAGE=PAGE,
        LINES=max(16, triton.next_power_of_2(step.heads // step.kv_heads)),
        WIDTH=max(16, triton.next_power_of_2(step.dim)),
        SPLITS=splits,
        **_span(step.dim, pages.k.element_size()),
        **_early(len(q) <= FEW),
    )
    _merge(parts, out, len(q) * step.heads, step.dim, splits)


def _span(dim: int, size: int) -> dict[str, int]:
    """How many tokens of the context a row looks at in one go (a multiple of PAGE): few goes, as far as keys and values fit into
    a multiprocessor's own memory."""
    width = triton.next_power_of_2(dim) * size
    span = 256 if width <= 128 else 128 if width <= 256 else PAGE
    return {"SPAN": span, "STAGES": 1, "num_warps": 8 if span == 256 else 4}


def _parts(q: Tensor, units: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what the parts of contexts give: sums, highest scores and totals."""
    if splits == 1:
        return q, q, q
    units *= len(q)
    return q.new_empty(units * dim), q.new_empty(units), q.new_empty(units)


def _merge(parts: tuple[Tensor, Tensor, Tensor], out: Tensor, units: int, dim: int, splits: int) -> None:
    if splits > 1:
        width = triton.next_power_of_2(dim)
        warps = 1 if splits * width <= 1024 else 4
        attention_kernels.merge_parts[(units,)](
            *parts, out, DIM=dim, WIDTH=width, SPLITS=splits, num_warps=warps, **_early(units <= FEW * 64)
        )


def _many(
    x: Tensor,
    weight: Weight,
    outs: Sequence[Tensor],
    norm: NormOf | None,
    bias: Tensor | None,
    add: bool,
    activation: str | None,
) -> None:
    """Through torch's matrix product: the input normalised and rounded, codes unpacked, the result split and added."""
    half = weight.kind != "f32" and not _INTERPRETED
    kind = torch.bfloat16 if half else torch.float32
    if norm is not None:
        rounded = torch.empty_like(x, dtype=kind)
        normalise(x, rounded, norm, 1, False)
        x = rounded
    x = x.to(kind)
    w = unpacked(weight) if half else weight.dense()
    if len(outs) == 1 and activation is None and bias is None and half and outs[0].dtype == torch.float32:
        if add:
            torch.addmm(outs[0], x, w.T, out_dtype=torch.float32, out=outs[0])
        else:
            torch.mm(x, w.T, out_dtype=torch.float32, out=outs[0])
        return
    y = torch.mm(x, w.T, out_dtype=torch.float32) if half else x @ w.T
    if bias is not None:
        y += bias
    if activation is not None:
        width = weight.rows // 2
        gate(y[:, :width], y[:, width:], outs[0], activation)
        return
    for out, part in zip(outs, y.split([out.shape[1] for out in outs], dim=1), strict=True):
        if add:
            out += part
        else:
            out.copy_(part)


def unpacked(weight: Weight) -> Tensor:
    """The whole matrix in bfloat16."""
    if not weight.bits:
        return weight.data
    out = torch.empty(weight.rows, weight.cols, dtype=torch.bfloat16, device=weight.data.device)
    every = torch.arange(weight.rows, dtype=torch.int32, device=out.device)
    embed(every, weight, out, 1.0)
    return out


def _tables(weight: Weight) -> tuple[Tensor, Tensor]:
    """Scales and minima, or anything where there are none: a kernel that is told so does not look."""
    return _or(weight.scales, weight.data), _or(weight.minima, weight.data)


def _kept(pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pages.k, pages.v, _or(pages.k_scale, pages.k), _or(pages.v_scale, pages.v)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _run(length: int, most: int) -> int:
    """Columns (or words) of a row that are read at once: all of a short row, a power of two."""
    return max(16, min(most, triton.next_power_of_2(length)))
