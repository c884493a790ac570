"""KL(teacher‖student) over a vocabulary with its gradient, in as few passes over the scores as there can be.

As with cross-entropy (`cross_entropy`), what is trained knows the gradient as soon as it knows both rows of scores: the student's
distribution minus the teacher's. So value and gradient are made together, the gradient in the place of the student's scores. On a
GPU one kernel does it; here is the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.errors import MissingExtra


@dataclass(frozen=True)
class Compared:
    """Of each row: KL at the temperature, minus the target's log-probability at temperature 1 (where that is the temperature),
    the student's likeliest token; and the gradient of the sum [n, V], in the dtype of the student's scores."""

    kl: Tensor
    nll: Tensor
    best: Tensor
    slope: Tensor


def forward_kl_with_slope(
    student: Tensor, teacher: Tensor, targets: Tensor, weights: Tensor, *, temperature: float = 1.0, hard: float = 0.0
) -> Compared:
    """For the sum over rows of weight · ((1 - hard)·τ²·KL + hard·nll). `student` [n, V] is overwritten. With `hard` the
    temperature has to be 1, for nll is always at 1."""
    assert not hard or temperature == 1.0
    plain = student.is_cuda and student.dtype != torch.float64
    if plain and student.is_contiguous() and teacher.is_contiguous():
        try:
            from orchard.ops.kernels.triton.divergence import forward_kl_on_gpu
        except (ImportError, MissingExtra):  # torch without Triton
            pass
        else:
            return forward_kl_on_gpu(student, teacher, targets, weights, temperature, hard)
    return forward_kl_in_torch(student, teacher, targets, weights, temperature=temperature, hard=hard)


def forward_kl_in_torch(
    student: Tensor, teacher: Tensor, targets: Tensor, weights: Tensor, *, temperature: float = 1.0, hard: float = 0.0
) -> Compared:
    """The plain twin."""
    kind = student.dtype if student.dtype in (torch.float32, torch.float64) else torch.float32
    x, weights = student.to(kind), weights.to(kind)
    best = x.argmax(-1)
    q = (x / temperature).log_softmax(-1)
    p = (teacher.to(kind) / temperature).log_softmax(-1)
    nll = -q.gather(-1, targets[:, None])[:, 0]
    share = p.exp()
    # What the teacher holds impossible counts for nothing, also where the student does.
    kl = torch.where(share == 0, 0.0, share * (p - q)).sum(-1)
    slope = q.exp_().sub_(share, alpha=1 - hard)
    if hard:
        slope.scatter_add_(1, targets[:, None], torch.full_like(weights, -hard)[:, None])
    slope.mul_(weights[:, None] * temperature)
    return Compared(kl, nll, best, slope.to(student.dtype))
