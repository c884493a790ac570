"""Mixers: parts that let tokens see each other. `(x, context) → y`."""

from orchard.nn.attention.attention import Attention
from orchard.nn.attention.rattention import RAttention
from orchard.nn.attention.rotary import Rotary

__all__ = ["Attention", "RAttention", "Rotary"]
