"""What the Triton kernels compute, in plain torch: slow, easy to read, and able to run anywhere.

The functions take what those of `launch` take, so that one program runs with either. Everything is computed in float32
from weights and stores as they are kept; the kernels multiply in bfloat16 where a call has several rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from orchard.ops.kernels.triton.rows import PAGE, Heads, Pages, Rows
from orchard.ops.kernels.triton.weights import Weight

NormOf = tuple[Tensor, float]
"""A norm's weight and eps."""


def normal(x: Tensor, norm: NormOf | None) -> Tensor:
    """x / rms(x) · weight over the last dimension, in float32."""
    x = x.float()
    if norm is None:
        return x
    weight, eps = norm
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def activate(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return functional.silu(x)
    if name == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def embed(tokens: Tensor, table: Weight, out: Tensor, scale: float) -> None:
    out.copy_(table.at(tokens.long()) * scale)


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
    y = normal(x, norm) @ weight.dense().T
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = y.chunk(2, dim=1)
        y = activate(activation, gate) * up
    for out, part in zip(outs, y.split([out.shape[1] for out in outs], dim=1), strict=True):
        out.copy_(out + part if add else part)


def normalise(x: Tensor, out: Tensor, norm: NormOf, groups: int, add: bool) -> None:
    """A norm over each of `groups` equal parts of a row."""
    y = normal(x.view(len(x), groups, -1), norm).view(len(x), -1)
    out.copy_(out + y if add else y)


def gate(gates: Tensor, ups: Tensor, out: Tensor, activation: str) -> None:
    out.copy_(activate(activation, gates.float()) * ups.float())


def keep_and_attend(
    q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, rows: Rows, heads: Heads, pages: Pages
) -> None:
    """All of an attention step: queries are spoilt, keys and values kept, and `out` is what every row sees."""
    keep(q, k, v, rows, heads, pages)
    attend(q, out, rows, heads, pages)


def keep(q: Tensor, k: Tensor | None, v: Tensor | None, rows: Rows, heads: Heads, pages: Pages) -> None:
    """Normalise and turn queries in place; normalise, turn and keep keys; keep values."""
    step = heads.step
    parts = q.view(len(q), step.heads, step.dim)
    parts.copy_(_turned(parts, heads.q_norm, step.q_norm.eps if step.q_norm else 0.0, rows.positions, heads))
    if k is None or v is None:
        return
    key = k.view(len(k), step.kv_heads, step.dim)
    key = _turned(key, heads.k_norm, step.k_norm.eps if step.k_norm else 0.0, rows.positions, heads)
    page = pages.table[rows.slots.long(), rows.positions.long() // PAGE].long()
    place = rows.positions.long() % PAGE
    for value, kept, scales in (
        (key, pages.k, pages.k_scale),
        (v.view(len(v), step.kv_heads, step.dim).float(), pages.v, pages.v_scale),
    ):
        if scales is None:
            kept[page, :, place] = value.to(kept.dtype)
            continue
        most = value.abs().amax(-1)
        scales[page, :, place] = most / 127
        safe = torch.where(most > 0, most / 127, 1.0)
        kept[page, :, place] = (value / safe[..., None]).round().to(torch.int8)


def attend(q: Tensor, out: Tensor, rows: Rows, heads: Heads, pages: Pages) -> None:
    """Attention of every row over its sequence's pages, one row after another."""
    step, spec = heads.step, pages.spec
    shared = step.heads // step.kv_heads
    for row in range(len(q)):
        query = int(rows.positions[row])
        past = torch.arange(query + 1, device=q.device)
        seen = past > query - step.window if step.window else torch.ones_like(past, dtype=torch.bool)
        if spec.keep:
            seen &= (past > query - spec.keep) | (past < spec.sinks)
        past = past[seen]
        page, place = pages.table[int(rows.slots[row]), past // PAGE].long(), past % PAGE
        k, v = pages.k[page, :, place].float(), pages.v[page, :, place].float()  # [L, H, D]
        if pages.k_scale is not None and pages.v_scale is not None:
            k, v = k * pages.k_scale[page, :, place, None], v * pages.v_scale[page, :, place, None]
        scores = torch.einsum("hgd,lhd->hgl", q[row].view(step.kv_heads, shared, step.dim), k) * step.scale
        if step.softcap > 0:
            scores = torch.tanh(scores / step.softcap) * step.softcap
        out[row] = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).reshape(-1)


def _turned(x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, heads: Heads) -> Tensor:
    """x [R, heads, D] normalised and turned: channel i with channel i + half of those that turn."""
    x = normal(x, None if weight is None else (weight, eps))
    if heads.turns is None:
        return x
    cos, sin = heads.turns[positions.long()][:, None].unbind(2)
    low, high, rest = x.tensor_split([heads.rotated, 2 * heads.rotated], dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
