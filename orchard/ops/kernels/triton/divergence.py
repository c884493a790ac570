"""KL(teacher‖student) and its gradient on a GPU: each row of both scores is read twice, the student's overwritten once.

The plain twin is `orchard.ops.forward_kl.forward_kl_in_torch`.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orchard.ops.forward_kl import Compared

BLOCK = 4096
"""Scores that a program holds at a time."""


@triton.jit
def compare(student, teacher, targets, weights, kl, nll, best, inverse, hard, VOCAB, BLOCK: tl.constexpr):
    """One row. With s and t the scores over the temperature, KL = Σ p·(t - s) - log Σ exp t + log Σ exp s; all three sums grow
    while reading, each beside the largest score so far. The second reading finds the row in cache."""
    row = tl.program_id(0).to(tl.int64)
    ours = student + row * VOCAB
    theirs = teacher + row * VOCAB
    top_s = float("-inf")
    top_t = float("-inf")
    sum_s = 0.0
    sum_t = 0.0
    apart = 0.0
    at = 0
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        s = tl.load(ours + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        t = tl.load(theirs + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        here = tl.max(s, axis=0)
        at = tl.where(here > top_s, start + tl.argmax(s, axis=0), at)
        larger = tl.maximum(top_s, here)
        sum_s = sum_s * tl.exp(top_s - larger) + tl.sum(tl.exp(s - larger), axis=0)
        top_s = larger
        larger = tl.maximum(top_t, tl.max(t, axis=0))
        grown = tl.exp(t - larger)
        shrunk = tl.exp(top_t - larger)
        sum_t = sum_t * shrunk + tl.sum(grown, axis=0)
        apart = apart * shrunk + tl.sum(tl.where(grown > 0.0, grown * (t - s), 0.0), axis=0)
        top_t = larger
    log_s = top_s + tl.log(sum_s)
    log_t = top_t + tl.log(sum_t)
    target = tl.load(targets + row)
    weight = tl.load(weights + row)
    picked = tl.load(ours + target).to(tl.float32) * inverse
    tl.store(kl + row, apart / sum_t - log_t + log_s)
    tl.store(nll + row, log_s - picked)
    tl.store(best + row, at)
    factor = weight / inverse
    tl.debug_barrier()  # everybody has read the target's score before it is overwritten
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        s = tl.load(ours + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        t = tl.load(theirs + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        slope = tl.exp(s - log_s) - (1.0 - hard) * tl.exp(t - log_t) - tl.where(column == target, hard, 0.0)
        tl.store(ours + column, (slope * factor).to(student.dtype.element_ty), mask=inside)


def forward_kl_on_gpu(
    student: Tensor, teacher: Tensor, targets: Tensor, weights: Tensor, temperature: float = 1.0, hard: float = 0.0
) -> Compared:
    """`student` [n, V], contiguous, becomes the gradient."""
    rows, vocab = student.shape
    kl, nll = (torch.empty(rows, dtype=torch.float32, device=student.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=student.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        with torch.cuda.device(student.device):
            compare[(rows,)](
                student,
                teacher,
                targets,
                weights.float(),
                kl,
                nll,
                best,
                1.0 / temperature,
                float(hard),
                vocab,
                BLOCK=block,
                num_warps=8,
            )
    return Compared(kl, nll, best, student)
