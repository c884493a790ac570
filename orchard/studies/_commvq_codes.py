"""What codes of keys are compared with in `commvq`: the same bits spent otherwise, all fitted on the same keys.

Shapes: H heads, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchard.ops import rope, vq, vq_attend
from orchard.ops.vq import Codebooks

Coder = Callable[[Tensor], Tensor]
"""[H, N, D] → the same after it was kept in few bits."""
GROUP = 32


def two_levels(x: Tensor, steps: int = 20) -> Coder:
    """One bit a channel: the two best levels of every channel (Lloyd's, on x), and nothing beside them."""
    levels = torch.quantile(x, torch.tensor([0.25, 0.75], device=x.device), dim=1)  # [2, H, D]
    for _ in range(steps):
        above = x > levels.mean(0)[:, None]
        counts = above.sum(1).clamp_min(1), (~above).sum(1).clamp_min(1)
        levels = torch.stack([(x * ~above).sum(1) / counts[1], (x * above).sum(1) / counts[0]])
    low, high = levels[0][:, None], levels[1][:, None]
    return lambda y: torch.where(y > (low + high) / 2, high, low)


def by_token(y: Tensor) -> Tensor:
    """One bit a number and two float16 for each group of 32 numbers of a token, two bits in all: its mean, and how far from it
    its numbers are (better than the least and the largest, which KIVI's form would keep)."""
    groups = y.unflatten(-1, (-1, GROUP))
    middle = groups.mean(-1, keepdim=True)
    apart = (groups - middle).abs().mean(-1, keepdim=True)
    return torch.where(groups > middle, middle + apart, middle - apart).flatten(-2)


def free_residual(x: Tensor, rounds: int, words: int, steps: int = 8, seed: int = 0) -> Coder:
    """Residual vector quantisation with `words` codewords of their own in each round: what commuting is the price of."""
    offset = x.mean(1, keepdim=True)
    dice = torch.Generator().manual_seed(seed)
    left, books = _unit(x - offset)[0], []
    for _ in range(rounds):
        words_now = left[:, torch.randperm(left.shape[1], generator=dice)[:words].to(x.device)]
        for _ in range(steps):
            index = _nearest(left, words_now)
            sums = torch.zeros_like(words_now).scatter_add_(1, index[..., None].expand_as(left), left)
            hits = torch.zeros(words_now.shape[:2], device=x.device).scatter_add_(
                1, index, torch.ones_like(left[..., 0])
            )
            words_now = torch.where(hits[..., None] > 0, sums / hits[..., None].clamp_min(1), words_now)
        left = left - _taken(words_now, _nearest(left, words_now))
        books.append(words_now)

    def code(y: Tensor) -> Tensor:
        unit, _ = _unit(y - offset)
        made = torch.zeros_like(unit)
        for book in books:
            made = made + _taken(book, _nearest(unit - made, book))
        size = ((y - offset) * made).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return offset + size.half().float() * made

    return code


def coded_keys(books: Codebooks) -> Coder:
    return lambda y: vq.decode_keys(books, *vq.encode_keys(books, y[None]))[0]


def error(coder: Coder, y: Tensor) -> float:
    """The mean square of what is lost."""
    return float((coder(y) - y).square().mean())


def effective_rank(x: Tensor) -> float:
    """How many directions keys really use (participation ratio of the covariance), the mean over heads."""
    centred = x - x.mean(1, keepdim=True)
    values = torch.linalg.eigvalsh(centred.mT @ centred / x.shape[1]).clamp_min(0)
    return float((values.sum(-1).square() / values.square().sum(-1).clamp_min(1e-30)).mean())


def commutation(books: Codebooks, k: Tensor, frequencies: Tensor, seed: int = 0) -> tuple[float, float]:
    """The largest difference of any number between rotated sums and sums of rotated codewords; and of scores from tables and
    explicit ones, as a share of the largest score. k: [H, N, D], positions 0 … N-1."""
    codes, scale = vq.encode_keys(books, k[None])
    places = torch.arange(k.shape[1], device=k.device)[None, None] * 7

    def rotate(keys: Tensor, positions: Tensor) -> Tensor:
        return rope.rotate(keys, *rope.tables(positions, frequencies))

    explicit = rotate(vq.decode_keys(books, codes, scale), places)
    index = codes.long() + torch.tensor([0, books.keys.shape[2]], device=k.device)
    heads = torch.arange(books.heads, device=k.device)[None, :, None]
    summed = rotate(books.key_offset[None, :, None].expand_as(explicit), places)
    for r in range(books.key_rounds):
        for half in range(2):
            words = books.key_words[heads, r, index[..., r, half]]
            summed = summed + scale.float() * rotate(words, places)
    apart = float((summed - explicit).abs().max() / explicit.abs().max())
    q = torch.randn(1, books.heads, 2, 4, k.shape[-1], generator=torch.Generator().manual_seed(seed)).to(k.device)
    turns = vq_attend.turns_of(rotate, places, k.shape[-1], q)
    assert turns is not None
    scores = q @ explicit[:, :, None].mT
    tables = vq_attend.table_scores(books, q, codes.flatten(3), scale, turns)
    return apart, float((tables - scores).abs().max() / scores.abs().max())


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return x / norm, norm


def _nearest(x: Tensor, words: Tensor) -> Tensor:
    return (x @ words.mT - words.square().sum(-1)[:, None] / 2).argmax(-1)


def _taken(words: Tensor, index: Tensor) -> Tensor:
    return words.gather(1, index[..., None].expand(-1, -1, words.shape[-1]))
