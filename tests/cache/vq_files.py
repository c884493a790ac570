"""Codebooks for tests: of random codewords, in files."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import fields
from pathlib import Path

import torch

from orchard.cache.codecs.commvq import KIND
from orchard.cache.codecs.fitted import write_fitted
from orchard.ops.vq import Codebooks


def random_books(heads: int, rounds: int, words: int, dim: int, seed: int = 0) -> Codebooks:
    """With offsets and metrics, and codewords that shrink from round to round."""
    make = torch.Generator().manual_seed(seed)
    shrink = 0.7 ** torch.arange(rounds)[None, :, None, None] * dim**-0.5
    keys = torch.randn(heads, rounds, words, dim, generator=make) * shrink
    values = torch.randn(heads, 2 * rounds, words, dim, generator=make) * shrink.repeat_interleave(2, 1)
    offsets = torch.randn(2, heads, dim, generator=make) * 0.3
    weight = torch.rand(heads, dim // 2, generator=make) + 0.2
    root = torch.randn(heads, dim, dim, generator=make) * dim**-0.5
    return Codebooks(keys.unflatten(-1, (-1, 2)), values, *offsets, weight, root @ root.mT + 0.3 * torch.eye(dim))


def write_books(path: Path, layers: dict[int, Codebooks], model: str = "a test") -> None:
    each = {n: {part.name: getattr(books, part.name) for part in fields(Codebooks)} for n, books in layers.items()}
    write_fitted(path, KIND, each, model=model)


@functools.cache
def file_for(heads: int, rounds: int, words: int, dim: int) -> str:
    """A file with the same codebooks for layers 0 to 3; gone when the tests are over."""
    folder = tempfile.TemporaryDirectory(prefix="orchard-codebooks-")
    _folders.append(folder)
    path = Path(folder.name) / "books.safetensors"
    write_books(path, dict.fromkeys(range(4), random_books(heads, rounds, words, dim)))
    return str(path)


_folders: list[tempfile.TemporaryDirectory[str]] = []
