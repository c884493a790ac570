"""Cross-entropy and its gradient on a GPU: each row of scores is read twice and overwritten once.

The plain twin is `orchard.ops.cross_entropy.cross_entropy_in_torch`.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orchard.ops.cross_entropy import Told

BLOCK = 4096
"""Scores that a program holds at a time."""


@triton.jit
def next_token(scores, targets, weights, nll, spread, best, z, VOCAB, BLOCK: tl.constexpr):
    """One row. The largest score and the sum of exponentials grow while reading; the second reading finds the row in cache."""
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * VOCAB
    top = float("-inf")
    total = 0.0
    at = 0
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        here = tl.max(x, axis=0)
        at = tl.where(here > top, start + tl.argmax(x, axis=0), at)
        larger = tl.maximum(top, here)
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(x - larger), axis=0)
        top = larger
    log = top + tl.log(total)
    target = tl.load(targets + row)
    weight = tl.load(weights + row)
    picked = tl.load(base + target).to(tl.float32)
    tl.store(nll + row, log - picked)
    tl.store(spread + row, log)
    tl.store(best + row, at)
    factor = weight * (1.0 + 2.0 * z * log)
    tl.debug_barrier()  # everybody has read the target's score before it is overwritten
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
        slope = tl.exp(x - log) * factor - tl.where(column == target, weight, 0.0)
        tl.store(base + column, slope.to(scores.dtype.element_ty), mask=inside)


def cross_entropy_on_gpu(scores: Tensor, targets: Tensor, weights: Tensor, z: float = 0.0) -> Told:
    """`scores` [n, V], contiguous, become the gradient."""
    rows, vocab = scores.shape
    nll, spread = (torch.empty(rows, dtype=torch.float32, device=scores.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        with torch.cuda.device(scores.device):
            next_token[(rows,)](
                scores, targets, weights.float(), nll, spread, best, float(z), vocab, BLOCK=block, num_warps=8
            )
    return Told(nll, spread, best, scores)
