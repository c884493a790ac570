"""Where the bytes of a compressed model's file are, to the byte.

`total` is the file: weights and their scales, the embedding, side paths, norms, the tokenizer's files, the header. Bits per
weight are of all of that, over the weights of the model before anything was shared, pruned or packed. So they cannot be made to
look small by leaving something out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COUNTED = ("scales", "embedding", "sides", "norms", "tokenizer", "header")
"""The numbers beside `weights` that add up to the file."""
NAMES = {
    "scales": "scales and tables",
    "embedding": "embedding",
    "sides": "side paths",
    "norms": "norms and biases",
    "tokenizer": "tokenizer",
    "header": "header",
}
MOST = 1 << 48


@dataclass(frozen=True)
class Accounting:
    """Bytes of a compressed model, by what they are for."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """What linear maps are kept as, by format: codes, or the values themselves. The embedding is not among them."""
    scales: int = 0
    """What else those formats keep: scales, minima, tables."""
    embedding: int = 0
    """The table of tokens, with its scales; also the head, where it is tied."""
    sides: int = 0
    norms: int = 0
    """Norms, biases and other vectors."""
    tokenizer: int = 0
    header: int = 0
    dense: int = 0
    """Weights of the original tree: what the bits are divided by."""
    kv_bytes_per_token: int = 0
    """Keys and values that the model keeps of every token; stores without a codec are counted in bfloat16."""

    @property
    def total(self) -> int:
        """The bytes of the file."""
        return sum(self.weights.values()) + sum(getattr(self, name) for name in COUNTED)

    @property
    def bits_per_weight(self) -> float:
        """All of the file, over the weights of the original."""
        return self.bits(self.total)

    def bits(self, count: int) -> float:
        """What some bytes come to for each weight of the original."""
        return 8 * count / self.dense if self.dense else 0.0

    def rows(self) -> list[tuple[str, int, float]]:
        """Part, bytes, bits per weight. They add up to the file and to its bits per weight; what is not there is left out."""
        found = [(f"weights, {name}", size) for name, size in sorted(self.weights.items())]
        found += [(NAMES[name], getattr(self, name)) for name in COUNTED]
        return [(name, size, self.bits(size)) for name, size in found if size]

    def counts(self) -> dict[str, Any]:
        """Whole numbers only: what a file holds."""
        counted = {name: getattr(self, name) for name in COUNTED}
        numbers = {"total": self.total, "dense_weights": self.dense, "kv_bytes_per_token": self.kv_bytes_per_token}
        return {"weights": dict(sorted(self.weights.items())), **counted, **numbers}

    def to_dict(self) -> dict[str, Any]:
        return {**self.counts(), "bits_per_weight": round(self.bits_per_weight, 4)}

    @classmethod
    def from_dict(cls, data: Any) -> Accounting | None:
        """The inverse; None where it is no accounting, or does not add up."""
        if not isinstance(data, dict) or not isinstance(data.get("weights"), dict):
            return None
        numbers: dict[str, Any] = {
            name: data.get(name) for name in (*COUNTED, "total", "dense_weights", "kv_bytes_per_token")
        }
        weights = data["weights"]
        if not all(type(value) is int and 0 <= value <= MOST for value in (*numbers.values(), *weights.values())):
            return None
        dense, kv, total = (numbers.pop(name) for name in ("dense_weights", "kv_bytes_per_token", "total"))
        found = cls(weights=dict(weights), dense=dense, kv_bytes_per_token=kv, **numbers)
        return found if found.total == total else None
