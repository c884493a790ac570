"""Write a model as one compressed file `.orchard`, and say beforehand what every byte of it is for.

    write_compressed("small.orchard", decoder, family=family, hf_config=hf, tokenizer_files=files, made={"from": "smollm2"})
    accounting(decoder, family=family, hf_config=hf, tokenizer_files=files, made=…).total     # the same number of bytes

Packed weights go in as they are, code for code. Floating-point tensors get the narrowest type that holds their very values; side
paths are kept in half precision, and rounded to it where they are not. What is not finite is refused by name. The same model
gives the same bytes, whatever dtype it is in memory. What such a file holds is described in `compressed_file`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UsageError
from orchard.core.progress import Advance, progress, silent
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, families
from orchard.nn.tensors import tensor_shapes
from orchard.weights.compressed_bits import COUNTED, Accounting
from orchard.weights.compressed_file import ENDING, FILES, FORMAT, KEY, pack_files
from orchard.weights.compressed_tree import Part, parts_of, sketch
from orchard.weights.safetensors import Lazy, header_of, stored_bytes, write_safetensors

Described = tuple[dict[str, str], Accounting]


def write_compressed(
    path: Path | str,
    decoder: Decoder,
    *,
    family: Family | str,
    hf_config: Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes],
    made: Mapping[str, Any] | None = None,
) -> int:
    """Write a whole file or none; its bytes. `hf_config` is the original's: what bits per weight are counted over, and what an
    export says. `made` is plain data: `from`, `licence`, `plan`, `report`."""
    path = Path(path)
    if path.suffix != ENDING:
        raise UsageError(f"{path.name} for a compressed model", hint=f"its name ends in {ENDING}")
    _refuse_other_tree(decoder)
    parts = list(parts_of(decoder))
    with progress(f"writing {path.name}", total=2 * len(parts)) as advance:
        tensors: dict[str, Tensor | Lazy] = {part.name: _written(part, advance) for part in parts}
        blob = _blob(pack_files(tokenizer_files))
        if blob is not None:
            tensors[FILES] = blob
        metadata, counted = _described(decoder.config, parts, tensors, family, hf_config, made or {})
        write_safetensors(path, tensors, metadata)
    size = path.stat().st_size
    assert size == counted.total, f"{size:,} bytes were written, and {counted.total:,} accounted for"
    return size


def accounting(
    model: Decoder | Decoder.Config,
    *,
    family: Family | str | None = None,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    made: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Accounting:
    """What every byte of a model's file is, or would be, for.

    With all that `write_compressed` gets, and a model with its values, this is the file to the byte. Of a tree alone the values
    are not known: vectors and weights that are kept plain are counted in `dtype`. Without `family` and `hf_config` bits are per
    weight of this tree and not of an original.
    """
    there = isinstance(model, Decoder)
    built = model if isinstance(model, Decoder) else sketch(model.complete(), Path("the tree"))
    tree, parts = built.config.complete(), list(parts_of(built))
    there = there and not any(tensor.is_meta for tensor in built.parameters())
    tensors: dict[str, Tensor | Lazy] = {
        part.name: _written(part, silent) if there else _planned(part, dtype) for part in parts
    }
    blob = _blob(pack_files(tokenizer_files or {}))
    if blob is not None:
        tensors[FILES] = blob
    return _described(tree, parts, tensors, family, hf_config, made or {})[1]


def kv_bytes_per_token(tree: Decoder.Config) -> int:
    """Keys and values kept of every token, over all layers that keep their own; in bfloat16 where there is no codec."""
    total = 0
    for mixer in (mixer for layer in tree.stack.layers for mixer in layer.mixers()):
        store: Any = getattr(mixer, "store", None)
        if store is not None and store.owner is None:
            total += store.codec.build().bytes_per_slot(store.heads, store.dim, torch.bfloat16)
    return total


# Tensors --------------------------------------------------------------------------------------------------------------


def _written(part: Part, advance: Advance) -> Lazy:
    """A part as it goes into the file. Its type may depend on its values, so they are looked at now and again when written."""
    tensor = getattr(part.module, part.attribute)
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ConfigError(f"{part.name} holds values that are not finite", hint="train or pack this weight again")
    dtype = part.dtype or narrowest(tensor)
    if part.kind == "sides" and dtype == torch.float16 and not bool(tensor.half().isfinite().all()):
        raise ConfigError(f"{part.name} holds values too large for half precision", hint="scale this side path down")
    if part.kind != "sides" and dtype != tensor.dtype and part.dtype is not None:
        raise ConfigError(f"{part.name} is kept in {tensor.dtype}, not in {part.dtype}", hint="pack this weight again")
    advance(1)
    return Lazy(part.shape, dtype, partial(_loaded, part, dtype, advance))


def _loaded(part: Part, dtype: torch.dtype, advance: Advance) -> Tensor:
    tensor: Tensor = getattr(part.module, part.attribute)
    advance(1)
    return tensor.detach().to(dtype)


def _planned(part: Part, dtype: torch.dtype) -> Lazy:
    return Lazy(part.shape, part.dtype or dtype, lambda: torch.empty(part.shape, dtype=part.dtype or dtype))


def narrowest(tensor: Tensor) -> torch.dtype:
    """The narrowest floating-point type that holds the very values; float32 where none does."""
    tensor = tensor.detach()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).to(torch.float32), tensor.to(torch.float32)):
            return dtype
    return torch.float32


def _blob(packed: bytes) -> Tensor | None:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else None


# The description ------------------------------------------------------------------------------------------------------


def _described(
    tree: Decoder.Config,
    parts: list[Part],
    tensors: Mapping[str, Any],
    family: Family | str | None,
    hf_config: Mapping[str, Any] | None,
    made: Mapping[str, Any],
) -> Described:
    """The metadata, and the accounting in it. The header counts itself: its length is put in until it stays. That ends, because a
    larger number never takes fewer letters."""
    sums: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for part in parts:
        size = stored_bytes(tensors[part.name])
        if part.kind == "weights":
            weights[part.label] += size
        else:
            sums[part.kind] += size
    sums["tokenizer"] = stored_bytes(tensors[FILES]) if FILES in tensors else 0
    known = None if family is None else family if isinstance(family, Family) else families().get(family)
    if family is not None and known is None:
        raise UsageError(f"no family called {family!r}", hint="one of " + ", ".join(families()))
    original = tree if known is None or hf_config is None else known.tree(dict(hf_config)).complete()
    dense = sum(math.prod(shape) for shape in tensor_shapes(original).values())
    told = {
        "format": FORMAT,
        "family": "" if known is None else known.name,
        "hf_config": dict(hf_config or {}),
        "tree": tree.to_dict(),
        "made": dict(made),
    }
    kv, header = kv_bytes_per_token(tree), 0
    while True:
        counts = {name: sums[name] for name in COUNTED if name != "header"}
        found = Accounting(dict(weights), header=header, dense=dense, kv_bytes_per_token=kv, **counts)
        metadata = {KEY: _json({**told, "bits": found.counts()})}
        length = 8 + len(header_of("the file", tensors, metadata)[1])
        if length == header:
            return metadata, found
        header = length


def _json(told: dict[str, Any]) -> str:
    try:
        return json.dumps(told, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the model's description cannot be written as JSON: {error}", hint="use plain data"
        ) from error


def _refuse_other_tree(decoder: Decoder) -> None:
    """A model whose tree does not say what it is made of would be read as something else."""
    tree = decoder.config.complete()
    meant = {part.name: (part.shape, part.dtype, part.label) for part in parts_of(sketch(tree, Path("the tree")))}
    real = {part.name: (part.shape, part.dtype, part.label) for part in parts_of(decoder)}
    odd = sorted(name for name in meant.keys() | real.keys() if meant.get(name) != real.get(name))
    if odd:
        raise ConfigError(
            f"the model's tree does not describe it: {odd[0]} is {real.get(odd[0])}, not {meant.get(odd[0])}",
            hint="give it the tree that it was built from",
        )
    lost = sorted(decoder.state_dict().keys() - real.keys())
    if lost:
        raise ConfigError(f"{lost[0]} is a tensor that no file knows", hint="make it a parameter of its module")
