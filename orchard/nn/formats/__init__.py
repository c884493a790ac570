"""Formats: how a weight lives in memory and on disk."""

from orchard.nn.formats.base import Format, Grouped, GroupedFormat, NativeWeight, NotLowered, Packed
from orchard.nn.formats.blocks import Blocks
from orchard.nn.formats.int2 import Int2
from orchard.nn.formats.int4 import Int4
from orchard.nn.formats.int8 import Int8
from orchard.nn.formats.learned import Learned
from orchard.nn.formats.palette import Palette
from orchard.nn.formats.plain import Plain

__all__ = [
    "Blocks",
    "Format",
    "Grouped",
    "GroupedFormat",
    "Int2",
    "Int4",
    "Int8",
    "Learned",
    "NativeWeight",
    "NotLowered",
    "Packed",
    "Palette",
    "Plain",
]
