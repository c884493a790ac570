"""Codebooks of stores that keep codes (CommVQ), as a plan holds them: float32 tensors by name, and a few numbers.

What the codes mean, and the plain twin of what the native engine does with them, is in `orchard/ops/vq.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from orchard.core.frozen import frozen

if TYPE_CHECKING:
    from orchard.ops.vq import Codebooks

WIDEST, MOST_ROUNDS, MOST_WORDS, MOST_EXACT = 512, 128, 256, 4096
"""What the native engine has room for: channels of a head, rounds, codewords of a round (vq.h), tokens that stay as they are."""
ARRAYS = ("keys", "values", "key_offset", "value_offset", "key_weight", "value_metric")


@dataclass(frozen=True, eq=False)
class Books:
    """One layer's codebooks as arrays. `exact`: the first tokens of a sequence, which are kept as they come."""

    keys: np.ndarray  # [H, R, n, D]: real parts of the D/2 pairs, then imaginary ones
    values: np.ndarray  # [H, R_v, m, D]
    key_offset: np.ndarray  # [H, D]
    value_offset: np.ndarray  # [H, D]
    key_weight: np.ndarray  # [H, D/2]
    value_metric: np.ndarray  # [H, D, D]
    exact: int = 0

    @classmethod
    def of(cls, books: Codebooks, exact: int) -> Books:
        """The same from tensors."""
        arrays = {name: getattr(books, name).detach().cpu().numpy() for name in ARRAYS}
        arrays["keys"] = np.concatenate([arrays["keys"][..., 0], arrays["keys"][..., 1]], -1)
        return cls(**arrays, exact=exact)


@frozen
class BooksSpec:
    """The same in a plan: names of tensors, and how to read them."""

    keys: str
    values: str
    key_offset: str
    value_offset: str
    key_weight: str
    value_metric: str
    key_rounds: int
    key_words: int
    value_rounds: int
    value_words: int
    exact: int = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in ARRAYS)

    def lengths(self, heads: int, dim: int) -> list[tuple[str, int]]:
        """How many numbers each tensor has."""
        return [
            (self.keys, heads * self.key_rounds * self.key_words * dim),
            (self.values, heads * self.value_rounds * self.value_words * dim),
            (self.key_offset, heads * dim),
            (self.value_offset, heads * dim),
            (self.key_weight, heads * dim // 2),
            (self.value_metric, heads * dim * dim),
        ]

    @property
    def slot_bytes(self) -> int:
        """Codes and prescales of one head's key and value."""
        key = 2 * self.key_rounds * (self.key_words.bit_length() - 1)
        value = self.value_rounds * (self.value_words.bit_length() - 1)
        return -(-key // 8) + -(-value // 8) + 4

    def exact_bytes(self, heads: int, dim: int) -> int:
        """Of the tokens that a sequence keeps as they come."""
        return 2 * heads * self.exact * dim * 4

    def numbers(self) -> tuple[int, ...]:
        return self.key_rounds, self.key_words, self.value_rounds, self.value_words, self.exact


def spec_of(books: Books, path: str, put: Callable[[str, np.ndarray], str]) -> BooksSpec:
    """`put` gives a tensor a name in the plan and answers it."""
    arrays = {field.name: getattr(books, field.name) for field in fields(books) if field.name in ARRAYS}
    names = {
        name: put(f"{path}.{name}", np.ascontiguousarray(array, np.float32).reshape(-1))
        for name, array in arrays.items()
    }
    return BooksSpec(
        **names,
        key_rounds=books.keys.shape[1],
        key_words=books.keys.shape[2],
        value_rounds=books.values.shape[1],
        value_words=books.values.shape[2],
        exact=books.exact,
    )
