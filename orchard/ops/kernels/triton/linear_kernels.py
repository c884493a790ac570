"""The Triton kernels of matrix products: one row times a matrix, and several rows times a matrix.

The first reads codes or dense weights, unpacks codes in registers and stays in float32 all the way. The second is for dense
weights and goes through matrix units, both sides rounded to bfloat16 (float32 where the weights are). A norm of the input costs
no pass of its own: rows are multiplied by its weight on the way in and by 1 / rms at the end.

Arguments of kernels are pointers and numbers without types of Python, so definitions here have none.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, KIND: tl.constexpr):
    """1 silu, 2 gelu, 3 gelu by tanh, 4 relu."""
    if KIND == 1:
        return x / (1 + tl.exp(-x))
    if KIND == 2:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if KIND == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1 + tl.exp(-2 * inner))
    return tl.maximum(x, 0.0)


@triton.jit
def write(out0, out1, out2, n0, n1, N, line0, line1, line2, y, rows, lines, inside, ADD: tl.constexpr):
    """y into up to three tables side by side: columns until n0, until n1, and the rest; `lines` are their rows."""
    at0 = out0 + lines * line0 + rows
    at1 = out1 + lines * line1 + (rows - n0)
    at2 = out2 + lines * line2 + (rows - n1)
    in0 = inside & (rows < n0)
    in1 = inside & (rows >= n0) & (rows < n1)
    in2 = inside & (rows >= n1) & (rows < N)
    if ADD:
        y0 = y + tl.load(at0, mask=in0, other=0.0)
        y1 = y + tl.load(at1, mask=in1, other=0.0)
        y2 = y + tl.load(at2, mask=in2, other=0.0)
        tl.store(at0, y0, mask=in0)
        tl.store(at1, y1, mask=in1)
        tl.store(at2, y2, mask=in2)
    else:
        tl.store(at0, y, mask=in0)
        tl.store(at1, y, mask=in1)
        tl.store(at2, y, mask=in2)


@triton.jit
def early(EARLY: tl.constexpr):
    """Let the next kernel begin beside this one's end, and wait for the end of the one before. What comes before this must
    not depend on other kernels (weights do not); every kernel of a chain has to call it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def dense_sums(
    x, w, norm, rows, K,
    NORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Σ w·x of some rows of a dense matrix, and Σ x²."""
    cols = tl.arange(0, BK)
    places = w + rows.to(tl.int64)[:, None] * K
    tile = tl.load(places + cols[None, :], mask=(cols < K)[None, :], other=0.0)
    early(EARLY)
    value = tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)
    squares = value * value
    if NORM:
        value = value * tl.load(norm + cols, mask=cols < K, other=0.0)
    sums = tile.to(tl.float32) * value[None, :]
    for k in tl.range(BK, K, BK, num_stages=STAGES):
        cols = k + tl.arange(0, BK)
        tile = tl.load(places + cols[None, :], mask=(cols < K)[None, :], other=0.0)
        value = tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)
        squares += value * value
        if NORM:
            value = value * tl.load(norm + cols, mask=cols < K, other=0.0)
        sums += tile.to(tl.float32) * value[None, :]
    return tl.sum(sums, axis=1), tl.sum(squares, axis=0)


@triton.jit
def coded(packed, ZERO: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The code at bit SHIFT (22 at most, with its own bits) less ZERO, times 2^SHIFT, in float32. A code that is put into the
    lower bits of the number 2^23 adds itself to it: quicker than turning whole numbers into floats, and exact."""
    mask: tl.constexpr = ((1 << BITS) - 1) << SHIFT
    number = ((packed & mask) | 0x4B000000).to(tl.float32, bitcast=True)
    if BITS == 2:  # its zero lies between two codes, and 2^23 with a half is no float32
        return (number - 8388608.0) - ZERO * (1 << SHIFT)
    return number - (8388608.0 + ZERO * (1 << SHIFT))


@triton.jit
def word_sums(
    x, norm, packed, scale, least, column, K,
    W: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, NORM: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Of each word: scale · Σ (code - zero)·x + minimum · Σ x, and Σ x²."""
    total = tl.zeros([BN, BW], tl.float32)
    summed = tl.zeros([BW], tl.float32)
    squares = tl.zeros([BW], tl.float32)
    PER: tl.constexpr = 22 // BITS
    for j in tl.static_range(32 // BITS):
        cols = column + j * W
        inside = cols < K
        value = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + cols, mask=inside, other=0.0)
        if MINIMUM:
            summed += value
        code = coded(packed >> (j // PER * PER * BITS), ZERO, j % PER * BITS, BITS)
        total += code * (value * (1.0 / (1 << (j % PER * BITS))))[None, :]
    total = scale.to(tl.float32) * total
    if MINIMUM:
        total += least.to(tl.float32) * summed[None, :]
    return total, squares


@triton.jit
def code_sums(
    x, w, scales, minima, norm, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, NORM: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same over words of codes."""
    W: tl.constexpr = GROUP * BITS // 32
    groups = (K + GROUP - 1) // GROUP
    words = groups * W
    places = w + rows.to(tl.int64)[:, None] * words
    tables = rows[:, None] * groups
    word = tl.arange(0, BW)
    there = (word < words)[None, :]
    packed = tl.load(places + word[None, :], mask=there, other=0)
    scale = tl.load(scales + tables + (word // W)[None, :], mask=there, other=0.0)
    least = scale
    if MINIMUM:
        least = tl.load(minima + tables + (word // W)[None, :], mask=there, other=0.0)
    early(EARLY)
    column = word // W * GROUP + word % W
    sums, squares = word_sums(x, norm, packed, scale, least, column, K, W, BITS, ZERO, MINIMUM, NORM, BN, BW)
    for k in tl.range(BW, words, BW, num_stages=STAGES):
        word = k + tl.arange(0, BW)
        there = (word < words)[None, :]
        packed = tl.load(places + word[None, :], mask=there, other=0)
        scale = tl.load(scales + tables + (word // W)[None, :], mask=there, other=0.0)
        least = scale
        if MINIMUM:
            least = tl.load(minima + tables + (word // W)[None, :], mask=there, other=0.0)
        column = word // W * GROUP + word % W
        more, square = word_sums(x, norm, packed, scale, least, column, K, W, BITS, ZERO, MINIMUM, NORM, BN, BW)
        sums += more
        squares += square
    return tl.sum(sums, axis=1), tl.sum(squares, axis=0)


@triton.jit
def one_row(
    x, w, scales, minima, bias, norm, out0, out1, out2, n0, n1, line, line0, line1, line2, N, K, eps,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row of x times BN rows of a matrix, and (gated) times the same rows of the one below it, N rows further."""
    TALL: tl.constexpr = 2 * BN if GATED else BN
    own = tl.program_id(1)
    x += own * line
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < N
    place = tl.arange(0, TALL)
    at = tl.program_id(0) * BN + place % BN
    at = tl.where(at < N, at, 0) + place // BN * N
    if BITS == 0:
        y, squares = dense_sums(x, w, norm, at, K, NORM, TALL, BK, STAGES, EARLY)
    else:
        y, squares = code_sums(
            x, w, scales, minima, norm, at, K, BITS, GROUP, ZERO, MINIMUM, NORM, TALL, BK, STAGES, EARLY
        )
    if NORM:
        y = y / tl.sqrt(squares / K + eps)
    if BIAS:
        y += tl.load(bias + at)
    if GATED:
        both = tl.reshape(y, [2, BN])
        upper = (tl.arange(0, 2) == 0)[:, None]
        y = activate(tl.sum(tl.where(upper, both, 0.0), axis=0), GATED) * tl.sum(tl.where(upper, 0.0, both), axis=0)
    write(out0, out1, out2, n0, n1, N, line0, line1, line2, y, rows, own, inside, ADD)


@triton.jit
def input_tile(x, norm, line, lines, cols, fits, K, NORM: tl.constexpr):
    """[columns, rows of x] in float32, and Σ x² of each row of x; the norm's weight is on it."""
    inside = cols < K
    value = tl.load(x + lines[None, :] * line + cols[:, None], mask=inside[:, None] & fits[None, :], other=0.0)
    value = value.to(tl.float32)
    squares = tl.sum(value * value, axis=0)
    if NORM:
        value = value * tl.load(norm + cols, mask=inside, other=0.0)[:, None]
    return value, squares


@triton.jit
def some_rows(
    x, w, bias, norm, out0, out1, out2, n0, n1, line, line0, line1, line2, M, N, K, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    HALF: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM rows of x times BN rows of a dense matrix, which is the left side: it has more rows than there are of x."""
    early(EARLY)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    lines = tl.program_id(1) * BM + tl.arange(0, BM)
    fits = lines < M
    at = tl.where(rows < N, rows, 0).to(tl.int64)
    kind = tl.bfloat16 if HALF else tl.float32
    precision: tl.constexpr = "tf32" if HALF else "ieee"
    y = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        cols = k + tl.arange(0, BK)
        inside = (cols < K)[None, :]
        value, square = input_tile(x, norm, line, lines, cols, fits, K, NORM)
        squares += square
        value = value.to(kind)
        tile = tl.load(w + at[:, None] * K + cols[None, :], mask=inside, other=0.0)
        y = tl.dot(tile.to(kind), value, y, input_precision=precision)
        if GATED:
            tile = tl.load(w + (at + N)[:, None] * K + cols[None, :], mask=inside, other=0.0)
            up = tl.dot(tile.to(kind), value, up, input_precision=precision)
    if NORM:
        factor = 1.0 / tl.sqrt(squares / K + eps)
        y = y * factor[None, :]
        up = up * factor[None, :]
    if BIAS:
        y += tl.load(bias + at)[:, None]
    if GATED:
        if BIAS:
            up += tl.load(bias + at + N)[:, None]
        y = activate(y, GATED) * up
    inside = (rows < N)[:, None] & fits[None, :]
    write(out0, out1, out2, n0, n1, N, line0, line1, line2, y, rows[:, None], lines[None, :], inside, ADD)
