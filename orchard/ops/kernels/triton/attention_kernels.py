"""The Triton kernels of attention over pages: keep keys and values, attend to parts of a context, put the parts together.

Arguments of kernels are pointers and numbers without types of Python, so definitions here have none.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from orchard.ops.kernels.triton.linear_kernels import early


@triton.jit
def turned(x, norm, eps, table, position, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """One head at `x`, normalised and turned: float32 [WIDTH], zeros past DIM."""
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    value = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        turns = channel < 2 * HALF
        other = tl.load(x + tl.where(turns, partner, 0), mask=inside & turns, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / DIM + eps)
        value = value * factor * tl.load(norm + channel, mask=inside, other=0.0)
        if HALF > 0:
            other = other * factor * tl.load(norm + tl.where(turns, partner, 0), mask=inside & turns, other=0.0)
    if HALF > 0:
        pair = tl.where(channel < HALF, channel, channel - HALF)
        cosine = tl.load(table + position * 2 * HALF + pair, mask=turns, other=0.0)
        sine = tl.load(table + position * 2 * HALF + HALF + pair, mask=turns, other=0.0)
        value = tl.where(turns, value * cosine + other * tl.where(channel < HALF, -sine, sine), value)
    return value


@triton.jit
def put(kept, scales, at, scale_at, value, inside, channel, CODES: tl.constexpr):
    """One head's key or value into its slot."""
    if CODES:
        most = tl.max(tl.abs(value), axis=0)
        tl.store(scales + scale_at, most / 127)
        ratio = value / tl.where(most > 0, most / 127, 1.0)
        # Half to even, as the twin: adding and taking away 1.5 · 2^23 rounds a float32 of this size.
        code = (ratio + 12582912.0) - 12582912.0
        tl.store(kept + at + channel, code.to(tl.int8), mask=inside)
    else:
        tl.store(kept + at + channel, value.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def keep_rows(
    q, k, v, k_pages, v_pages, k_scales, v_scales, table, slots, positions, turns, q_norm, k_norm,
    pages, q_eps, k_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, CODES: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query in place, or a key and a value into their page."""
    early(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    if head < HEADS:
        query_at = q + (row * HEADS + head) * DIM
        query = turned(query_at, q_norm, q_eps, turns, position, DIM, HALF, Q_NORM, WIDTH)
        tl.debug_barrier()  # every channel was read as a partner before any is overwritten
        tl.store(query_at + channel, query, mask=inside)
    else:
        page = tl.load(table + tl.load(slots + row) * pages + position // PAGE).to(tl.int64)
        place = (page * KV + head - HEADS) * PAGE + position % PAGE
        at = (row * KV + head - HEADS) * DIM
        key = turned(k + at, k_norm, k_eps, turns, position, DIM, HALF, K_NORM, WIDTH)
        put(k_pages, k_scales, place * DIM, place, key, inside, channel, CODES)
        value = tl.load(v + at + channel, mask=inside, other=0.0).to(tl.float32)
        put(v_pages, v_scales, place * DIM, place, value, inside, channel, CODES)


@triton.jit
def look(query, key, value, seen, top, total, summed, scale, softcap, CAPPED: tl.constexpr, FULL: tl.constexpr):
    """Queries [LINES, WIDTH] at some more keys and values [n, WIDTH], of which `seen` [LINES, n] count: the highest score so far,
    the total of weights under it, and the weighted sum of values."""
    kind = tl.float32 if FULL else tl.bfloat16
    precision: tl.constexpr = "ieee" if FULL else "tf32"
    scores = tl.dot(query, tl.trans(key.to(kind)), input_precision=precision) * scale
    if CAPPED:
        scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no infinity minus infinity
    weights = tl.exp(scores - base[:, None])
    factor = tl.exp(top - base)
    total = total * factor + tl.sum(weights, axis=1)
    summed = tl.dot(weights.to(kind), value.to(kind), summed * factor[:, None], input_precision=precision)
    return higher, total, summed


@triton.jit
def attend_tiles(
    q, out, sums, tops, totals, k_pages, v_pages, k_scales, v_scales, table, slots, positions, firsts, counts,
    pages, scale, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    KEEP: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, CODES: tl.constexpr, FULL: tl.constexpr,
    PAGE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The rows of a tile, all query heads that share one key head, over one part of their context, page after page."""
    early(EARLY)
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    SHARED: tl.constexpr = HEADS // KV
    kind = tl.float32 if FULL else tl.bfloat16
    first = tl.load(firsts + tile)
    count = tl.load(counts + tile)
    line = tl.arange(0, LINES)
    row = first + line // SHARED
    live = line // SHARED < count
    head = kv * SHARED + line % SHARED
    channel = tl.arange(0, WIDTH)
    wide = channel < DIM
    here = live[:, None] & wide[None, :]
    place = (row * HEADS + head)[:, None] * DIM + channel[None, :]
    query = tl.load(q + place, mask=here, other=0.0).to(kind)
    position = tl.load(positions + row, mask=live, other=0)
    begin = 0
    if REACH > 0:
        begin = tl.maximum(tl.load(positions + first) - REACH + 1, 0) // PAGE
    end = tl.load(positions + first + count - 1) // PAGE + 1
    each = (end - begin + SPLITS - 1) // SPLITS
    begin += split * each
    end = tl.minimum(begin + each, end)
    pages_of = table + tl.load(slots + first) * pages
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    summed = tl.zeros([LINES, WIDTH], tl.float32)
    inner = tl.arange(0, PAGE)
    for index in tl.range(begin, end, num_stages=STAGES):
        base = (tl.load(pages_of + index).to(tl.int64) * KV + kv) * PAGE
        spot = (base + inner)[:, None] * DIM + channel[None, :]
        key = tl.load(k_pages + spot, mask=wide[None, :], other=0.0)
        value = tl.load(v_pages + spot, mask=wide[None, :], other=0.0)
        if CODES:
            key = key.to(tl.float32) * tl.load(k_scales + base + inner)[:, None]
            value = value.to(tl.float32) * tl.load(v_scales + base + inner)[:, None]
        past = (index * PAGE + inner)[None, :]
        seen = (past <= position[:, None]) & live[:, None]
        if WINDOW > 0:
            seen = seen & (past > position[:, None] - WINDOW)
        if KEEP > 0:
            seen = seen & ((past > position[:, None] - KEEP) | (past < SINKS))
        top, total, summed = look(query, key, value, seen, top, total, summed, scale, softcap, CAPPED, FULL)
    if SPLITS == 1:
        tl.store(out + place, summed / total[:, None], mask=here)
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(sums + part[:, None] * DIM + channel[None, :], summed, mask=here)
        tl.store(tops + part, top, mask=live)
        tl.store(totals + part, total, mask=live)


@triton.jit
def turned_lines(x, norm, eps, table, position, live, DIM: tl.constexpr, HALF: tl.constexpr,
                 NORM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Some heads of one row, at x [LINES], as `turned` does it: float32 [LINES, WIDTH]."""
    channel = tl.arange(0, WIDTH)
    inside = live[:, None] & (channel < DIM)[None, :]
    turns = channel < 2 * HALF
    partner = tl.where(turns, tl.where(channel < HALF, channel + HALF, channel - HALF), 0)
    value = tl.load(x[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x[:, None] + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / DIM + eps)
        value = value * factor[:, None] * tl.load(norm + channel, mask=channel < DIM, other=0.0)[None, :]
        other = other * factor[:, None] * tl.load(norm + partner, mask=turns, other=0.0)[None, :]
    if HALF > 0:
        pair = tl.where(channel < HALF, channel, channel - HALF)
        cosine = tl.load(table + position * 2 * HALF + pair, mask=turns, other=0.0)
        sine = tl.load(table + position * 2 * HALF + HALF + pair, mask=turns, other=0.0)
        sine = tl.where(channel < HALF, -sine, sine)
        value = tl.where(turns[None, :], value * cosine[None, :] + other * sine[None, :], value)
    return value


@triton.jit
def attend_new(
    q, k, v, out, sums, tops, totals, k_pages, v_pages, table, slots, positions, turns, q_norm, k_norm,
    pages, q_eps, k_eps, scale, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, OWN: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, all query heads that share one key head, over one part of its context. The row's own key and value come from
    registers (OWN: they are new) and are kept on the way; so no other row of the call may be of the same sequence."""
    early(EARLY)
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    SHARED: tl.constexpr = HEADS // KV
    kind = tl.float32 if FULL else tl.bfloat16
    position = tl.load(positions + row)
    pages_of = table + tl.load(slots + row) * pages
    line = tl.arange(0, LINES)
    live = line < SHARED
    unit = row * HEADS + kv * SHARED + line
    channel = tl.arange(0, WIDTH)
    wide = channel < DIM
    here = live[:, None] & wide[None, :]
    query = turned_lines(q + unit * DIM, q_norm, q_eps, turns, position, live, DIM, HALF, Q_NORM, WIDTH)
    query = query.to(kind)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    summed = tl.zeros([LINES, WIDTH], tl.float32)
    seen_until = position
    if OWN:
        seen_until = position - 1
        if split == 0:
            at = (row * KV + kv) * DIM
            new_key = turned(k + at, k_norm, k_eps, turns, position, DIM, HALF, K_NORM, WIDTH)
            new_key = new_key.to(k_pages.dtype.element_ty)
            new_value = tl.load(v + at + channel, mask=wide, other=0.0).to(v_pages.dtype.element_ty)
            page = tl.load(pages_of + position // PAGE).to(tl.int64)
            spot_of = ((page * KV + kv) * PAGE + position % PAGE) * DIM
            tl.store(k_pages + spot_of + channel, new_key, mask=wide)
            tl.store(v_pages + spot_of + channel, new_value, mask=wide)
            top = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
            if CAPPED:
                top = softcap * (1 - 2 / (1 + tl.exp(2 * top / softcap)))
            total = total + 1.0
            summed = summed + new_value.to(tl.float32)[None, :]
    begin = 0
    if REACH > 0:
        begin = tl.maximum(position - REACH + 1, 0) // SPAN
    end = seen_until // SPAN + 1  # before the first token there is nothing: one span that is masked, or none
    each = (end - begin + SPLITS - 1) // SPLITS
    begin += split * each
    end = tl.minimum(begin + each, end)
    inner = tl.arange(0, SPAN)
    for index in tl.range(begin, end, num_stages=STAGES):
        past = index * SPAN + inner
        page_at = tl.load(pages_of + past // PAGE, mask=past <= seen_until, other=0).to(tl.int64)
        spot = (((page_at * KV + kv) * PAGE + past % PAGE) * DIM)[:, None] + channel[None, :]
        key = tl.load(k_pages + spot, mask=wide[None, :], other=0.0)
        value = tl.load(v_pages + spot, mask=wide[None, :], other=0.0)
        seen = past <= seen_until
        if WINDOW > 0:
            seen = seen & (past > position - WINDOW)
        if KEEP > 0:
            seen = seen & ((past > position - KEEP) | (past < SINKS))
        seen = seen[None, :] & live[:, None]
        top, total, summed = look(query, key, value, seen, top, total, summed, scale, softcap, CAPPED, FULL)
    if SPLITS == 1:
        tl.store(out + unit[:, None] * DIM + channel[None, :], summed / total[:, None], mask=here)
    else:
        part = unit * SPLITS + split
        tl.store(sums + part[:, None] * DIM + channel[None, :], summed, mask=here)
        tl.store(tops + part, top, mask=live)
        tl.store(totals + part, total, mask=live)


@triton.jit
def merge_parts(
    sums, tops, totals, out, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
):
    """One head of one row out of its parts."""
    early(EARLY)
    unit = tl.program_id(0)
    part = unit * SPLITS + tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    top = tl.load(tops + part)
    factor = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(tl.load(totals + part) * factor, axis=0)
    values = tl.load(sums + part[:, None] * DIM + channel[None, :], mask=inside[None, :], other=0.0)
    tl.store(out + unit * DIM + channel, tl.sum(values * factor[:, None], axis=0) / total, mask=inside)
