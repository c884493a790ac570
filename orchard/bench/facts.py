"""What the arithmetic of a benchmark needs to know about a model: its sizes, read from the header of its GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from orchard.bench.shapes import Shape, packed_bytes
from orchard.core.errors import UsageError
from orchard.weights.gguf.reader import GGUFFile
from orchard.weights.library import Library

TABLE, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Facts:
    """`step_bytes`: weights that one step reads; `body` and `head`: parameters used for every token, and only where scores are
    wanted; `kv_bytes`: keys and values of one token at two bytes a number."""

    path: Path
    file_bytes: int
    step_bytes: int
    body: int
    head: int
    kv_bytes: int
    vocab: int
    context: int


def facts(model: str) -> Facts:
    """Of a model of the library or a path. Only GGUF: a benchmark of the same weights needs a file that llama.cpp reads."""
    path = Library().resolve(model)
    if path.is_dir():
        raise UsageError(
            f"{model} is a folder, and llama.cpp reads GGUF files only",
            hint="name a GGUF model; Model.save writes one from a folder",
        )
    with GGUFFile.open(path) as file:
        name = str(file.metadata.get("general.architecture", ""))
        sizes = {tensor: info.nbytes for tensor, info in file.tensors.items()}
        counts = {tensor: math.prod(info.shape) for tensor, info in file.tensors.items()}
        layers, width, heads, context = (
            _whole(file, f"{name}.{key}")
            for key in ("block_count", "embedding_length", "attention.head_count", "context_length")
        )
        kv_heads = _whole(file, f"{name}.attention.head_count_kv", heads)
        head_dim = _whole(file, f"{name}.attention.key_length", width // heads)
        vocab = file.tensors[TABLE].shape[0] if TABLE in file.tensors else 0
    if not vocab:
        raise UsageError(f"{model} has no {TABLE}", hint="name a language model")
    tied = HEAD not in sizes
    return Facts(
        path=path,
        file_bytes=path.stat().st_size,
        step_bytes=sum(sizes.values())
        - (0 if tied else sizes[TABLE]),  # a table that is not also the head gives one row
        body=sum(counts.values()) - counts[TABLE] - counts.get(HEAD, 0),
        head=counts[TABLE if tied else HEAD],
        kv_bytes=layers * kv_heads * head_dim * 2 * 2,
        vocab=vocab,
        context=context,
    )


def shape_facts(shape: Shape, *, step_bytes: int) -> Facts:
    """The same for a shape with random weights of that many bytes."""
    table = shape.vocab * shape.width
    return Facts(
        path=Path(),
        file_bytes=step_bytes,
        step_bytes=step_bytes,
        body=shape.parameters - table,
        head=table,
        kv_bytes=shape.kv_bytes,
        vocab=shape.vocab,
        context=shape.context,
    )


def shape_bytes(shape: Shape, kind: str) -> int:
    """`q4`, `q2` as Orchard packs them in groups of 64; `Q4_0` as in GGUF: 18 bytes for 32 numbers."""
    return shape.parameters // 32 * 18 if kind == "Q4_0" else packed_bytes(shape, kind)


def _whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{file.path.name} does not say {key} in one number", hint="benchmark a model whose layers are alike"
        )
    return value
