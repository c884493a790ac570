"""Codewords of keys as whole multiples of a unit, so that sums of 16-bit numbers are exact.

The native engine adds codewords up in whole numbers. Each pair of channels has a unit of its own, a power of two: the smallest
for which no sum of one codeword, and one times i, per round leaves 16 bits. Codebooks that are on this grid are read natively
to the last bits of float32; others are rounded to it (a step is about 1e-4 of a key's spread).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from orchard.ops.vq import Codebooks

LIMIT = 32767


def units(keys: Tensor) -> Tensor:
    """Of keys [H, R, n, P, 2], for each pair: float32 [H, P]; 1 where all codewords are 0. The same rule as in vq.cpp."""
    most = keys.abs().amax(2).double().sum((1, 3))  # the largest real and imaginary part of every round
    exponent = torch.frexp(most / (LIMIT - 2 * keys.shape[1])).exponent
    return torch.where(most > 0, torch.ldexp(torch.ones_like(most), exponent), torch.ones_like(most)).float()


def on_grid(books: Codebooks) -> Codebooks:
    """The same with key codewords rounded to their units."""
    keys = books.keys
    unit = units(keys)
    for _ in range(4):  # rounding may push a sum over the edge of its unit, once
        rounded = (keys / unit[:, None, None, :, None]).round() * unit[:, None, None, :, None]
        grown = units(rounded)
        if torch.equal(grown, unit):
            break
        unit = torch.maximum(grown, unit)
    return replace(books, keys=rounded)
