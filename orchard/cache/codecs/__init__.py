"""Codecs: how one slot of a store is kept."""

from orchard.cache.codecs.base import Codec, Parts
from orchard.cache.codecs.int8 import Int8
from orchard.cache.codecs.plain import Plain

__all__ = ["Codec", "Int8", "Parts", "Plain"]
