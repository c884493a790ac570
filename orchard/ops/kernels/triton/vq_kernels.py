"""The Triton kernel of attention straight from additive codes (`ops/vq.py`): one new token a sequence, over many slots.

A block of slots is put together from codewords in registers, a half of the channels at a time (pairs lie half a head apart),
turned by the cosines and sines of its positions, and shared by the query heads of its key head. Nothing but codes and prescales
of slots is read from memory; codewords stay in the cache.

Arguments of kernels are pointers and numbers without types of Python, so definitions here have none.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put_together(words, codes, at, inside, pair, narrow, ROUNDS: tl.constexpr, WORDS: tl.constexpr, DIM: tl.constexpr,
                 BYTES: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sums of codewords for slots `at` [SPAN]: both halves of their channels, float32 [SPAN, WIDTH] each."""
    HALF: tl.constexpr = DIM // 2
    real = tl.zeros([SPAN, WIDTH], tl.float32)
    imaginary = tl.zeros([SPAN, WIDTH], tl.float32)
    wide = inside[:, None] & narrow[None, :]
    for r in range(ROUNDS):
        byte = tl.load(codes + at * BYTES + r, mask=inside, other=0).to(tl.int32)
        first = words + (r * 2 * WORDS + (byte & 15))[:, None] * DIM + pair[None, :]
        second = words + (r * 2 * WORDS + WORDS + (byte >> 4))[:, None] * DIM + pair[None, :]
        real += tl.load(first, mask=wide, other=0.0) + tl.load(second, mask=wide, other=0.0)
        imaginary += tl.load(first + HALF, mask=wide, other=0.0) + tl.load(second + HALF, mask=wide, other=0.0)
    return real, imaginary


@triton.jit
def attend_codes(
    q, mask, sums, tops, totals, k_codes, k_scales, v_codes, v_scales, k_words, v_words, k_offset, v_offset, turns,
    slots, each, scale, softcap, turn_heads,
    KV: tl.constexpr, SHARED: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr, DIM: tl.constexpr, BYTES: tl.constexpr,
    CAPPED: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """All query heads of one key head of one sequence, over one part of its slots: the highest score, the total of weights under
    it, and the weighted sum of values."""
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    HALF: tl.constexpr = DIM // 2
    head = row * KV + kv
    line = tl.arange(0, LINES)
    live = line < SHARED
    pair = tl.arange(0, WIDTH)
    narrow = pair < HALF
    here = live[:, None] & narrow[None, :]
    query = q + (head * SHARED + line)[:, None] * DIM + pair[None, :]
    q_real = tl.load(query, mask=here, other=0.0)
    q_imaginary = tl.load(query + HALF, mask=here, other=0.0)
    k_words += kv * ROUNDS * 2 * WORDS * DIM
    v_words += kv * ROUNDS * 2 * WORDS * DIM
    ko_real = tl.load(k_offset + kv * DIM + pair, mask=narrow, other=0.0)
    ko_imaginary = tl.load(k_offset + kv * DIM + HALF + pair, mask=narrow, other=0.0)
    vo_real = tl.load(v_offset + kv * DIM + pair, mask=narrow, other=0.0)
    vo_imaginary = tl.load(v_offset + kv * DIM + HALF + pair, mask=narrow, other=0.0)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    sum_real = tl.zeros([LINES, WIDTH], tl.float32)
    sum_imaginary = tl.zeros([LINES, WIDTH], tl.float32)
    begin = split * each
    end = tl.minimum(begin + each, slots)
    for start in range(begin, end, SPAN):
        slot = start + tl.arange(0, SPAN)
        inside = slot < end
        at = (head * slots + slot).to(tl.int64)
        seen = tl.load(mask + at, mask=inside, other=0) != 0
        wide = inside[:, None] & narrow[None, :]
        real, imaginary = put_together(
            k_words, k_codes, at, inside, pair, narrow, ROUNDS, WORDS, DIM, BYTES, SPAN, WIDTH
        )
        size = tl.load(k_scales + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        real = real * size + ko_real[None, :]
        imaginary = imaginary * size + ko_imaginary[None, :]
        turn = turns + ((row * turn_heads + kv % turn_heads) * slots + slot)[:, None] * DIM + pair[None, :]
        cosine = tl.load(turn, mask=wide, other=0.0)
        sine = tl.load(turn + HALF, mask=wide, other=0.0)
        k_real = real * cosine - imaginary * sine
        k_imaginary = imaginary * cosine + real * sine
        scores = tl.dot(q_real, tl.trans(k_real), input_precision="ieee")
        scores = tl.dot(q_imaginary, tl.trans(k_imaginary), scores, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
        scores = tl.where(seen[None, :] & live[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no infinity minus infinity
        weights = tl.exp(scores - base[:, None])
        factor = tl.exp(top - base)
        total = total * factor + tl.sum(weights, axis=1)
        real, imaginary = put_together(
            v_words, v_codes, at, inside, pair, narrow, ROUNDS, WORDS, DIM, BYTES, SPAN, WIDTH
        )
        size = tl.load(v_scales + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        real = real * size + vo_real[None, :]
        imaginary = imaginary * size + vo_imaginary[None, :]
        sum_real = tl.dot(weights, real, sum_real * factor[:, None], input_precision="ieee")
        sum_imaginary = tl.dot(weights, imaginary, sum_imaginary * factor[:, None], input_precision="ieee")
        top = higher
    part = (head * SHARED + line) * SPLITS + split
    place = part[:, None] * DIM + pair[None, :]
    tl.store(sums + place, sum_real, mask=here)
    tl.store(sums + place + HALF, sum_imaginary, mask=here)
    tl.store(tops + part, top, mask=live)
    tl.store(totals + part, total, mask=live)
