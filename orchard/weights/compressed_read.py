"""A compressed model file as a checkpoint: its own tree, its tensors dense or exactly as they are packed.

The tree says what belongs into the file, so `config()` holds every tensor of it against the tree, name, shape and type, and
nothing may be missing or left over. Only then does anybody build something of the claimed size.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import BadFile, OrchardError
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import families
from orchard.models.zoo.fields import shown
from orchard.nn.formats import Format, Grouped, GroupedFormat, NotLowered, Packed
from orchard.nn.linear import Weight
from orchard.weights.checkpoint import DISAGREE, INCOMPLETE, Checkpoint
from orchard.weights.compressed_bits import Accounting
from orchard.weights.compressed_file import CompressedFile
from orchard.weights.compressed_tree import Part, checked_tree, parts_of, sketch
from orchard.weights.safetensors import dtype_name

FLOATS = ("F32", "F16", "BF16")
LOOKED_AT = 1 << 22
"""Numbers of a tensor."""


class CompressedCheckpoint(Checkpoint):
    """An open `.orchard` file."""

    source: CompressedFile

    @classmethod
    def open(cls, path: Path) -> CompressedCheckpoint:
        file = CompressedFile.open(path)
        try:
            family = families().get(file.family)
            if family is None:
                raise BadFile(f"{path}: no family is called {shown(file.family)}", hint=DISAGREE)
            return cls(path, "orchard", family, file.hf_config, file.tensors, file, file.licence)
        except BaseException:
            file.close()
            raise

    @property
    def accounting(self) -> Accounting:
        return self.source.accounting

    def config(self) -> Decoder.Config:
        """The tree as it was stored: formats, stores, side paths and all."""
        return self._checked[0].clone()

    def name(self, ours: str, tree: Decoder.Config) -> str:
        return self._parts_of(ours)[0].name

    def check(self, ours: str, shape: tuple[int, ...], tree: Decoder.Config) -> list[str]:
        parts = self._parts_of(ours)
        found = _dense_shape(parts)
        if found != tuple(shape):
            raise BadFile(f"{ours} has shape {list(found)}, not {list(shape)}", hint=DISAGREE)
        return [part.name for part in parts]

    def spare(self, tree: Decoder.Config) -> set[str]:
        return set(self.tensors)  # `config` has found a place for each of them

    def holds(self, ours: str) -> bool:
        return ours in self._checked[1]

    def read(self, ours: str, tree: Decoder.Config) -> Tensor:
        parts = self._parts_of(ours)
        packed = self._packed(parts)
        module = parts[0].module
        if not _is_weight(parts[0]):
            return packed[parts[0].attribute]
        if "weight" in packed and len(packed) == 1:
            return packed["weight"]  # as it is: float32 would be twice the room
        assert isinstance(module, Weight)
        return module.format.unpack(packed, torch.float32)

    def read_grouped(self, ours: str, tree: Decoder.Config) -> Grouped | None:
        parts = self._parts_of(ours)
        module: Any = parts[0].module
        if not _is_weight(parts[0]) or not isinstance(module.format, GroupedFormat):
            return None
        try:
            return module.format.grouped(self._packed(parts), module.shape)
        except NotLowered:  # scales that are no half-precision numbers: the dense weight is as good
            return None

    def read_packed(self, ours: str, format: Format, shape: tuple[int, ...]) -> Packed | None:
        """The parts of a weight exactly as they lie in the file; None where the file's format or shape is another."""
        if not self.holds(ours):
            return None
        parts = self._parts_of(ours)
        module: Any = parts[0].module
        asked: Any = format
        same = _is_weight(parts[0]) and module.shape == tuple(shape) and module.format.config == asked.config
        return self._packed(parts) if same else None

    # Inside -------------------------------------------------------------------------------------------------------

    @cached_property
    def _checked(self) -> tuple[Decoder.Config, dict[str, list[Part]]]:
        tree = checked_tree(self.source.tree, self.path, self.accounting.total)
        found: dict[str, list[Part]] = {}
        names = set()
        try:
            for part in parts_of(sketch(tree, self.path)):
                self._check_part(part)
                names.add(part.name)
                found.setdefault(part.ours, []).append(part)
        except BadFile:
            raise
        except OrchardError as error:
            raise BadFile(f"{self.path}: {error.message}", hint=DISAGREE) from error
        left = [name for name in self.tensors if name not in names]
        if left:
            more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
            raise BadFile(f"{self.path}: {shown(left[0])}{more} belong to no part of the model", hint=DISAGREE)
        return tree, found

    def _check_part(self, part: Part) -> None:
        info: Any = self.tensors.get(part.name)
        if info is None:
            raise BadFile(f"{self.path.name} has no tensor {part.name!r}", hint=INCOMPLETE)
        if tuple(info.shape) != part.shape:
            raise BadFile(f"tensor {part.name!r} has shape {list(info.shape)}, not {list(part.shape)}", hint=DISAGREE)
        allowed = FLOATS if part.dtype is None or part.kind == "sides" else (dtype_name(part.dtype),)
        if info.dtype not in allowed:
            kind = shown(info.dtype)
            raise BadFile(f"tensor {part.name!r} is kept as {kind}, not as {' or '.join(allowed)}", hint=DISAGREE)

    def _parts_of(self, ours: str) -> list[Part]:
        parts = self._checked[1].get(ours)
        if parts is None:
            raise BadFile(f"{self.path.name} has no tensor {ours!r}", hint=INCOMPLETE)
        return parts

    def _packed(self, parts: list[Part]) -> Packed:
        return {part.attribute: self._numbers(part) for part in parts}

    def _numbers(self, part: Part) -> Tensor:
        """A tensor of the file. One scale that is no number would spoil all that the model ever says, so it is looked for; large
        dense weights are only read when they are needed."""
        found = self.source.read(part.name)
        if found.is_floating_point() and found.numel() <= LOOKED_AT and not bool(found.isfinite().all()):
            count = int((~found.isfinite()).sum())
            problem = f"{self.path.name}: {count:,} of {found.numel():,} values of {part.name!r} are no finite numbers"
            raise BadFile(problem, hint="get or make the file again")
        return found


def _is_weight(part: Part) -> bool:
    return isinstance(part.module, Weight) and part.kind in ("weights", "scales", "embedding")


def _dense_shape(parts: list[Part]) -> tuple[int, ...]:
    module: Any = parts[0].module
    return tuple(module.shape) if _is_weight(parts[0]) else parts[0].shape
