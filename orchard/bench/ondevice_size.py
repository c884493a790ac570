"""Sizes of a compressed model beside its original's: the file, what it says of its bytes, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import UsageError
from orchard.core.report import Value

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder


@dataclass(frozen=True)
class Original:
    """What sizes are held against. `dense`: its weights, all of them."""

    path: Path
    bytes: int
    dense: int
    vocab: int
    kv: int

    @classmethod
    def of(cls, path: Path) -> Original:
        import math

        from orchard.nn.tensors import tensor_shapes
        from orchard.weights.checkpoint import open_checkpoint
        from orchard.weights.library import bytes_in

        with open_checkpoint(path) as checkpoint:
            tree = checkpoint.config().complete()
        size = bytes_in(path) if path.is_dir() else path.stat().st_size
        dense = sum(math.prod(shape) for shape in tensor_shapes(tree).values())
        return cls(path, size, dense, tree.vocab, uncoded_kv(tree))


def uncoded_kv(tree: Decoder.Config) -> int:
    """Bytes of keys and values of one token in bfloat16, whatever codec their stores have."""
    from orchard.cache.codecs import Plain
    from orchard.cache.store import Store
    from orchard.weights.compressed import kv_bytes_per_token

    return kv_bytes_per_token(tree.rewrite(Store, lambda node: node.clone(codec=Plain.Config())).complete())


def size_values(name: str, path: Path, original: Original) -> Iterator[tuple[str, Value]]:
    """Values of one compressed file. Its bytes are counted anew from the model that was read from it: what the header says was
    counted by whoever wrote it."""
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.compressed import accounting, kv_bytes_per_token
    from orchard.weights.compressed_read import CompressedCheckpoint
    from orchard.weights.load import load_decoder

    size = path.stat().st_size
    with open_checkpoint(path) as checkpoint:
        if not isinstance(checkpoint, CompressedCheckpoint):
            raise UsageError(f"{path} is no compressed model", hint="name a .orchard file")
        told, source = checkpoint.accounting, checkpoint.source
        tree = checkpoint.config().complete()
        about: dict[str, Any] = {"family": checkpoint.family, "hf_config": checkpoint.hf_config}
        counted = accounting(load_decoder(checkpoint), tokenizer_files=source.files(), made=source.made, **about)
    off = max(abs(counted.total - size), abs(told.total - size), abs(counted.dense - original.dense))
    yield f"{name} file", Value(size, unit="bytes", note=path.name)
    yield f"{name} file over original", Value(size / original.bytes, note=f"{original.bytes:,} bytes")
    yield (
        f"{name} bytes off",
        Value(off, unit="bytes", note="the file, what it says, what is counted anew; and weights of the original"),
    )
    yield (
        f"{name} bits per weight",
        Value(8 * size / original.dense, note="all of the file, over the original's weights"),
    )
    for part, count, bits in counted.rows():
        yield f"{name} bytes, {part}", Value(count, unit="bytes", note=f"{bits:.4f} bits per weight")
    yield f"{name} KV over original", Value(uncoded_kv(tree) / original.kv, note="both in bfloat16")
    yield f"{name} KV", Value(kv_bytes_per_token(tree), unit="bytes per token", note="as its stores code them")
