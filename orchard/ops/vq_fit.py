"""Find codebooks for keys and values by expectation and maximisation, a round at a time (CommVQ, arXiv 2506.18879).

Each round models what the rounds before it left over. Vectors belong to sums a_A + b_B of two codewords, first softly and ever
harder as a temperature falls, then hard as encoding will have it; codewords are solved for by weighted least squares. For keys
b = i·a: with z = e_A + i·e_B for each vector, (Σ zᴴz) c = Σ zᴴx for the n complex vectors c, where Σ zᴴz has only the masses of
A, of B and of pairs in it. For values a and b are free, and both are solved for together.

To solve for the codewords of all rounds together afterwards, given their codes, was tried on one head of SmolLM2 and won next to
nothing: codes that are chosen round by round want rounds that were found one after another.

Shapes: H heads (fitted side by side), N vectors, D channels, P = D/2 pairs, n codewords.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from orchard.ops import vq
from orchard.ops.vq import Codebooks, flat, paired, turned

SMALL = 1e-4
"""Mass that every codeword is given beside its vectors, as a share of the mean mass: empty ones stay solvable and go to zero."""
SOFT, HARD = 2048, 4096
"""Vectors that a step looks at, drawn anew for each: soft steps only find where to begin."""


def fit(
    k: Tensor,
    v: Tensor,
    *,
    rounds: int,
    words: int = 16,
    weight: Tensor | None = None,
    metric: Tensor | None = None,
    soft: int = 3,
    steps: int = 5,
    seed: int = 0,
) -> Codebooks:
    """Codebooks for unrotated keys and values [H, N, D]: `rounds` of keys and twice as many of values, `words` in each.

    `weight` [H, P] and `metric` [H, D, D] say which errors matter (None: all alike); `soft` and `steps`: of each round, soft and
    hard.
    """
    heads, _, dim = k.shape
    weight = torch.ones(heads, dim // 2, device=k.device) if weight is None else weight.float()
    metric = torch.eye(dim, device=k.device).expand(heads, dim, dim).clone() if metric is None else metric.float()
    k, v = k.float(), v.float()
    offsets = k.mean(1), v.mean(1)
    dice = torch.Generator().manual_seed(seed)
    # In channels scaled by the root of their metric all errors are alike; scaling pairs commutes with rotations.
    root = torch.cat([weight, weight], dim=-1).sqrt()[:, None]
    keys = _rounds(_unit(k - offsets[0][:, None]) * root, rounds, words, soft, steps, dice, tied=True)
    square = torch.linalg.cholesky(metric)
    values = _rounds(_unit(v - offsets[1][:, None]) @ square, rounds, words, soft, steps, dice, tied=False)
    values = torch.linalg.solve_triangular(square[:, None], values.flatten(2, 3), upper=False, left=False)
    c = paired(keys[:, :, 0] / root[:, None])
    return Codebooks(c, values.unflatten(2, (2, words)).flatten(1, 2), *offsets, weight, metric)


def key_error(books: Codebooks, k: Tensor) -> float:
    """The mean square of what encoding loses of keys [H, N, D], in the metric of keys."""
    lost = vq.decode_keys(books, *vq.encode_keys(books, k[None]))[0] - k
    return float((paired(lost).square().sum(-1) * books.key_weight[:, None]).mean())


def value_error(books: Codebooks, v: Tensor) -> float:
    lost = vq.decode_values(books, *vq.encode_values(books, v[None]))[0] - v
    return float((lost @ books.value_metric * lost).mean())


# One round ------------------------------------------------------------------------------------------------------------


def _rounds(x: Tensor, rounds: int, n: int, soft: int, steps: int, dice: torch.Generator, *, tied: bool) -> Tensor:
    """Codewords [H, R, 2, n, D] of x [H, N, D]; tied: the second half is the first times i."""
    left, found = x, []
    for _ in range(rounds):
        ab = _begin(left, n, dice, tied)
        for step in range(soft):
            some = _some(left, SOFT, dice)
            heat = 0.3 * 0.01 ** (step / max(soft - 1, 1))
            scores = _scores(some, ab)
            share = (scores / (scores.std() * heat).clamp_min(1e-12)).softmax(-1).unflatten(-1, (n, n))
            ab = _solved(some, share.sum(-1), share.sum(-2), share.sum(1), tied)
        for _ in range(steps):
            some = _some(left, HARD, dice)
            a, b = _nearest(some, ab)
            joint = torch.stack([torch.bincount(both, minlength=n * n) for both in a * n + b])
            shares = one_hot(a, n).to(x.dtype), one_hot(b, n).to(x.dtype)
            ab = _solved(some, *shares, joint.unflatten(1, (n, n)).to(x.dtype), tied)
        left = left - _sum(ab, *_nearest(left, ab))
        found.append(ab)
    return torch.stack(found, dim=1)


def _some(x: Tensor, count: int, dice: torch.Generator) -> Tensor:
    if x.shape[1] <= count:
        return x
    return x[:, torch.randperm(x.shape[1], generator=dice)[:count].to(x.device)]


def _begin(x: Tensor, n: int, dice: torch.Generator, tied: bool) -> Tensor:
    """Some of the vectors, drawn alike for all heads, as both halves; again where there are too few."""
    index = torch.randperm(x.shape[1], generator=dice).to(x.device)
    index = index.repeat(-(-2 * n // len(index)))[: 2 * n]
    drawn = x[:, index].unflatten(1, (2, n)) * torch.linspace(1.0, 0.9, n, device=x.device)[:, None] / 2**0.5
    return torch.stack([drawn[:, 0], _times_i(drawn[:, 0])], dim=1) if tied else drawn


def _scores(x: Tensor, ab: Tensor) -> Tensor:
    """How near every sum a_A + b_B is: [H, N, n²], larger is nearer (half the squared distance, up to a constant)."""
    a, b = ab.unbind(1)
    costs = a.square().sum(-1)[:, :, None] / 2 + b.square().sum(-1)[:, None, :] / 2 + a @ b.mT
    return ((x @ a.mT)[..., :, None] + ((x @ b.mT)[..., None, :] - costs[:, None])).flatten(-2)


def _nearest(x: Tensor, ab: Tensor) -> tuple[Tensor, Tensor]:
    n = ab.shape[2]
    best = torch.cat([_scores(some, ab).argmax(-1) for some in x.split(4096, dim=1)], dim=1)
    return best // n, best % n


def _sum(ab: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return vq._taken(ab.flatten(1, 2), torch.stack([a, b + ab.shape[2]], dim=-1))


def _solved(x: Tensor, a: Tensor, b: Tensor, joint: Tensor, tied: bool) -> Tensor:
    """Codewords [H, 2, n, D] from the shares [H, N, n] of both halves and the mass of pairs [H, n, n]."""
    n = a.shape[-1]
    small = SMALL * x.shape[1] / n
    mass_a, mass_b = torch.diag_embed(joint.sum(-1) + small), torch.diag_embed(joint.sum(-2) + small)
    if tied:
        gram = mass_a + mass_b + 1j * (joint - joint.mT)
        z = torch.view_as_complex(paired(x).contiguous())
        c = flat(torch.view_as_real(torch.linalg.solve(gram, torch.complex(a, -b).mT @ z)))
        return torch.stack([c, _times_i(c)], dim=1)
    gram = torch.cat([torch.cat([mass_a, joint], dim=-1), torch.cat([joint.mT, mass_b], dim=-1)], dim=-2)
    return torch.linalg.solve(gram, torch.cat([a, b], dim=-1).mT @ x).unflatten(1, (2, n))


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def _times_i(x: Tensor) -> Tensor:
    return flat(turned(paired(x)))
