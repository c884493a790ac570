"""Numbers in 8 bits by blocks: codes into a table of 256 values, and one float32 scale per block (arXiv 2110.02861).

The table is dynamic: a code's leading zeros are its decimal exponent and its remaining bits divide that decade evenly, so seven
decades are covered and large values, which matter most, are the finest. Written from the paper's description: the decade of
exponent -e holds the midpoints of 2^(bits - e) equal parts of [0.1, 1] times 10^-e; 0 and 1 have codes of their own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
DECADES = 7


@lru_cache(maxsize=16)
def table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values within [-1, 1] or [0, 1] that codes stand for, from the lowest to the highest."""
    bits = DECADES - 1 if signed else DECADES
    values = []
    for e in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (bits - e) + 1, dtype=torch.float64) if bits >= e else torch.zeros(0)
        values += ((edges[:-1] + edges[1:]) / 2 * 10.0**-e).tolist()
    positive = sorted({*values, 1.0})
    everything = [0.0, *positive, *(-value for value in positive)] if signed else [0.0, *positive]
    # With a sign there is one value too many: -1 is left out, and the lowest is -0.993.
    return torch.tensor(sorted(everything)[-256:], dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _borders(signed: bool, device: torch.device) -> Tensor:
    values = table(signed, device)
    return (values[1:] + values[:-1]) / 2


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 of x's shape, and the largest magnitude of each block [⌈n / 256⌉]. In an unsigned tensor, a value that is not
    zero never becomes zero: it may be what something is divided by."""
    flat = functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(-1)
    relative = flat / torch.where(scales > 0, scales, 1)[:, None]
    codes = torch.bucketize(relative, _borders(signed, x.device), out_int32=True)
    if not signed:
        codes = torch.where(relative > 0, codes.clamp_min(1), codes)
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 values that codes and scales stand for."""
    values = table(signed, codes.device)[codes.flatten().int()]
    padded = functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return padded.flatten()[: codes.numel()].view(codes.shape)
