"""Codecs: how one slot of a store is kept."""

from orchard.cache.codecs.base import Codec, Parts
from orchard.cache.codecs.commvq import CommVQ
from orchard.cache.codecs.int4 import Int4
from orchard.cache.codecs.int8 import Int8
from orchard.cache.codecs.plain import Plain

__all__ = ["Codec", "CommVQ", "Int4", "Int8", "Parts", "Plain"]
