"""Formats: how a weight lives in memory and on disk."""

from orchard.nn.formats.base import Format, Packed
from orchard.nn.formats.int8 import Int8
from orchard.nn.formats.plain import Plain

__all__ = ["Format", "Int8", "Packed", "Plain"]
