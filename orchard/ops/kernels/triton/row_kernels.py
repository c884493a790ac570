"""The Triton kernels that go row by row: rows of a table, norms, gates.

Arguments of kernels are pointers and numbers without types of Python, so definitions here have none.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from orchard.ops.kernels.triton.linear_kernels import activate, coded, early


@triton.jit
def table_rows(
    tokens, w, scales, minima, out, K, scale_by,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of a table, unpacked."""
    early(EARLY)
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = cols < K
    if BITS == 0:
        value = tl.load(w + token * K + cols, mask=inside, other=0.0).to(tl.float32)
    else:
        W: tl.constexpr = GROUP * BITS // 32
        groups = (K + GROUP - 1) // GROUP
        group = cols // GROUP
        spot = cols % GROUP
        packed = tl.load(w + token * groups * W + group * W + spot % W, mask=inside, other=0)
        code = coded(packed >> (spot // W * BITS), ZERO, 0, BITS)
        scale = tl.load(scales + token * groups + group, mask=inside, other=0.0).to(tl.float32)
        value = code * scale
        if MINIMUM:
            value += tl.load(minima + token * groups + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + cols, value * scale_by, mask=inside)


@triton.jit
def norm_parts(x, weight, out, D, eps, ADD: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr):
    """One part of a row, normalised: parts lie one after another."""
    early(EARLY)
    at = tl.program_id(0).to(tl.int64) * D
    channel = tl.arange(0, BD)
    inside = channel < D
    value = tl.load(x + at + channel, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)
    value = value * factor * tl.load(weight + channel, mask=inside, other=0.0)
    if ADD:
        value += tl.load(out + at + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + channel, value, mask=inside)


@triton.jit
def gate_rows(gates, ups, out, line, N, GATED: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr):
    """act(gate) · up; `line`: from one row of gates (and of ups) to the next."""
    early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = cols < N
    gate = tl.load(gates + row * line + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * line + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + cols, activate(gate, GATED) * up, mask=inside)
