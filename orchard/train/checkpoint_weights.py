"""The model's weights out of a checkpoint, as one plain safetensors file: for export, and for anything else that reads those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import UsageError
from orchard.core.files import safe_join
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint_manifest import Manifest
from orchard.train.checkpoint_tensors import DTYPES, Piece, TensorFile, write_tensors
from orchard.train.state import AVERAGES, MODEL


def weights_file(place: Path, manifest: Manifest, *, average: bool = False) -> Path:
    """The file that is there, if one holds all; otherwise one that is put together, tensor by tensor."""
    chosen = {name.removeprefix(MODEL): about for name, about in manifest.tensors.items() if name.startswith(MODEL)}
    if average:
        averages = {name: about for name, about in manifest.tensors.items() if name.startswith(AVERAGES)}
        if not averages:
            raise UsageError(f"{place} holds no averages", hint="train with an EMA, or take the weights themselves")
        chosen |= {name.removeprefix(AVERAGES): about for name, about in averages.items()}
    files = {part["file"] for about in chosen.values() for part in about["parts"]}
    manifest.verify(place, files=files)
    if len(files) == 1 and not average and _holds_weights_only(manifest, files):
        return safe_join(place, next(iter(files)))
    target, part = _beside(place, "averages" if average else "weights")
    opened = {file: TensorFile(safe_join(place, file)) for file in files}
    pieces = [
        Piece(name, DTYPES[about["dtype"]], about["shape"], _joined(about, opened)) for name, about in chosen.items()
    ]
    with disk.disk(target):
        disk.remove(part)
        write_tensors(part, pieces)
        part.replace(target)
        disk.flush_folder(target.parent)
    return target


def put_together(place: Path) -> list[Path]:
    """The files that `weights_file` may have made beside a checkpoint."""
    return [*_beside(place, "weights"), *_beside(place, "averages")]


def _beside(place: Path, kind: str) -> tuple[Path, Path]:
    """A file's name, and its name while it is written."""
    target = place.with_name(f"{place.name}.{kind}.safetensors")
    return target, target.with_name(f".{target.name}.part")


def _holds_weights_only(manifest: Manifest, files: set[str]) -> bool:
    return all(
        name.startswith(MODEL) and part["shape"] == about["shape"]
        for name, about in manifest.tensors.items()
        for part in about["parts"]
        if part["file"] in files
    )


def _joined(about: dict[str, Any], opened: dict[str, TensorFile]) -> Callable[[], Tensor]:
    def made() -> Tensor:
        tensor = torch.empty(about["shape"], dtype=DTYPES[about["dtype"]])
        for part in about["parts"]:
            window = tensor
            for axis, (offset, length) in enumerate(zip(part["at"], part["shape"])):
                window = window.narrow(axis, offset, length)
            window.copy_(opened[part["file"]].read(part["key"]))
        return tensor

    return made
