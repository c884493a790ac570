"""How large a model will be, from its tree alone: bytes of its file, what a token reads, what a token leaves in the stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from orchard.core.config import BaseConfig
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.session.build import Built
from orchard.weights.compressed import accounting

HALF = torch.bfloat16
"""What dense numbers are kept in."""
RESERVE = 192
"""Bytes of the header for the place of the tokenizer's files, and for numbers that are longer than was thought."""


@dataclass(frozen=True)
class Size:
    """`file`: all bytes of the file; `read`: of the weights that one token needs; `kv`: that it adds to the stores."""

    file: int
    weights: int
    """Of the original, dense: what bits are counted by, whatever was taken away since."""
    read: int
    kv: int

    @property
    def bits(self) -> float:
        return 8 * self.file / self.weights

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.file,
            "bits_per_weight": round(self.bits, 4),
            "bytes_read_per_token": self.read,
            "kv_bytes_per_token": self.kv,
        }


@dataclass(frozen=True)
class Scale:
    """What sizes of one model's forms are worked out with."""

    built: Built
    words: int
    """Bytes of the tokenizer's files, packed."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """What the file will say of how it was made."""
    _known: dict[str, Size] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, built: Built, files: Mapping[str, bytes], made: Mapping[str, Any]) -> Scale:
        found = accounting(built.decoder.config, tokenizer_files=files)
        return cls(built, found.tokenizer, made)

    def __call__(self, tree: Any) -> Size:
        key = repr(tree)
        if key not in self._known:
            found = accounting(tree, family=self.built.family, hf_config=self.built.hf_config, made=self.made)
            size = found.total + self.words + RESERVE
            self._known[key] = Size(size, found.dense, read_per_token(tree), found.kv_bytes_per_token)
        return self._known[key]


def weight_bytes(node: BaseConfig) -> int:
    """Of one weight, as its format keeps it."""
    one: Any = node
    if isinstance(node, Embedding.Config):
        shape: tuple[int, ...] = (one.vocab, one.dim)
    elif isinstance(node, GroupedLinear.Config):
        shape = (one.count, one.out_dim, one.in_dim)
    else:
        shape = (one.out_dim, one.in_dim)
    bytes_: int = one.format.build().nbytes(shape, HALF)
    return bytes_


def read_per_token(tree: Any) -> int:
    """Bytes of weights that one token needs: all of them, but of a table that is only looked up one row, and of experts those
    that are asked."""
    total = 0
    for path, node in tree.walk():
        if isinstance(node, Embedding.Config):
            total += weight_bytes(node) if tree.head is None else weight_bytes(node) // node.vocab
        elif isinstance(node, GroupedLinear.Config):
            router = getattr(tree.get(path.rpartition(".")[0]), "router", None)
            total += weight_bytes(node) * min(getattr(router, "k", node.count), node.count) // node.count
        elif isinstance(node, Linear.Config):
            total += weight_bytes(node) + 2 * getattr(node, "r", 0) * (node.in_dim + node.out_dim)
    return total
