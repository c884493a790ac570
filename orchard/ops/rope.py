"""Rotary positions: turn pairs of channels by an angle that grows with the position (RoFormer, arXiv 2104.09864).

Channels are paired half a head apart (i with i + D/2), as Hugging Face checkpoints store them. GGUF files of the Llama
family pair neighbours instead; their rows are reordered when they are read.

Shapes: B sequences, H heads, T tokens, D head width, R rotated channels (R ≤ D).
"""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(theta: float, dim: int) -> Tensor:
    """Radians per position for each of dim/2 channel pairs, float32."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def tables(positions: Tensor, inverse_frequencies: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., T, R] in float32 for positions [..., T]."""
    angles = positions[..., None].float() * inverse_frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * gain, angles.sin() * gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of x [B, H, T, D]; the others pass unchanged."""
    rotated = cos.shape[-1]
    head, rest = x[..., :rotated], x[..., rotated:]
    half = rotated // 2
    turned = torch.cat([-head[..., half:], head[..., :half]], dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    head = head * cos + turned * sin
    return head if rest.shape[-1] == 0 else torch.cat([head, rest], dim=-1)
