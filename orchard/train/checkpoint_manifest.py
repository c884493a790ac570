"""The manifest of a checkpoint: one JSON file, written last, that says what is there and how each byte can be checked.

It takes the place of the pickled index of `torch.distributed.checkpoint`. A folder is a checkpoint only if its manifest is whole
(it holds a SHA-256 of itself) and every file it names is there in its full size.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from orchard.core.errors import BadFile, OrchardError, UnsupportedFormat
from orchard.core.files import safe_join
from orchard.core.version import VERSION
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint_tensors import DAMAGED, DTYPES, NAMES, file_digest

NAME = "manifest.json"
KIND, EDITION = "orchard checkpoint", 1


@dataclass(frozen=True)
class Stored:
    """Where a part of a tensor lies: a file of the folder, the key in it, the size and the digest of the whole file."""

    file: str
    key: str
    bytes: int
    sha256: str


@dataclass
class Manifest:
    step: int
    processes: int
    tensors: dict[str, dict[str, Any]]
    """name → dtype, shape, and parts: file, key, at (the offset of the part), shape (of the part)"""
    files: dict[str, dict[str, Any]]
    """name → bytes, sha256"""
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Last of all files; flushed, and the folder's entries with it."""
        body = {"kind": KIND, "edition": EDITION, **self.__dict__, "versions": versions()}
        body = json.loads(json.dumps(body))  # as it will be read: keys are texts, tuples are lists
        text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
        descriptor = disk.create(folder / NAME)
        try:
            disk.put(descriptor, text.encode())
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
        disk.flush_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Whole, or a typed error."""
        path = folder / NAME
        try:
            body = json.loads(path.read_bytes())
            said = body.pop("sha256")
            kind, edition = body.pop("kind"), body.pop("edition")
        except OSError as error:
            raise BadFile(f"{folder} holds no checkpoint: {error.strerror}", hint=DAMAGED) from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise BadFile(f"{path} is damaged", hint=DAMAGED) from error
        if kind != KIND or edition != EDITION:
            raise UnsupportedFormat(
                f"{path} is {kind!r} of edition {edition!r}, and this Orchard reads {EDITION}",
                hint="load it with the version of Orchard that wrote it",
            )
        if _digest({"kind": kind, "edition": edition, **body}) != said:
            raise BadFile(f"{path} is damaged: its checksum is wrong", hint=DAMAGED)
        try:
            found = cls(**body)
        except TypeError as error:
            raise BadFile(f"{path} lacks something or has too much: {error}", hint=DAMAGED) from error
        found._check(path)
        return found

    def sizes(self, folder: Path) -> None:
        """Every file is there in its full size: what can be known without reading them."""
        for name, about in self.files.items():
            path = safe_join(folder, name)
            size = path.stat().st_size if path.is_file() else None
            if size != about["bytes"]:
                what = "is missing" if size is None else f"has {size:,} bytes and not {about['bytes']:,}"
                raise BadFile(f"{path} {what}", hint=DAMAGED)

    def verify(self, folder: Path, *, part: int = 0, parts: int = 1, files: set[str] | None = None) -> None:
        """Read files and compare their digests; several processes take turns."""
        wanted = sorted(self.files) if files is None else sorted(files)
        for name in wanted[part::parts]:
            path = safe_join(folder, name)
            if file_digest(path) != self.files[name]["sha256"]:
                raise BadFile(f"{path} is damaged: its checksum is wrong", hint=DAMAGED)

    def metadata(self) -> Metadata:
        """As the planners of torch.distributed.checkpoint want it. A shared tensor is offered under all of its names."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Stored] = {}
        shared = {alias: self.tensors[name] for alias, name in self.aliases.items()}
        for name, about in {**self.tensors, **shared}.items():
            chunks = []
            for part in about["parts"]:
                chunks.append(ChunkStorageMetadata(torch.Size(part["at"]), torch.Size(part["shape"])))
                file = self.files[part["file"]]
                places[MetadataIndex(name, part["at"])] = Stored(
                    part["file"], part["key"], file["bytes"], file["sha256"]
                )
            properties = TensorProperties(dtype=DTYPES[about["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(about["shape"]), chunks)
        return Metadata(tensors, storage_data=places)

    def _check(self, path: Path) -> None:
        """The digest tells damage from health; this tells a checkpoint from something made by hand."""
        try:
            for name, about in self.tensors.items():
                known = about["dtype"] in DTYPES and all(part["file"] in self.files for part in about["parts"])
                ranks = all(len(part["at"]) == len(part["shape"]) == len(about["shape"]) for part in about["parts"])
                if not known or not ranks:
                    raise BadFile(f"{path}: {name} has no usable description", hint=DAMAGED)
            if not self.aliases.keys().isdisjoint(self.tensors) or not set(self.aliases.values()) <= set(self.tensors):
                raise BadFile(f"{path}: a second name belongs to no tensor", hint=DAMAGED)
        except (TypeError, KeyError, AttributeError) as error:
            raise BadFile(f"{path} is damaged: {error!r}", hint=DAMAGED) from error


def describe(metadata: Metadata, places: dict[MetadataIndex, Stored]) -> dict[str, dict[str, Any]]:
    """The `tensors` of a manifest from a plan's metadata and from where the parts were put."""
    tensors = {}
    for name, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), name
        parts = []
        for chunk in about.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            parts.append({"file": place.file, "key": place.key, "at": list(chunk.offsets), "shape": list(chunk.sizes)})
        tensors[name] = {"dtype": NAMES[about.properties.dtype], "shape": list(about.size), "parts": parts}
    return tensors


def whole(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint that can be loaded as far as names, sizes and the manifest's own digest tell."""
    try:
        found = Manifest.read(folder)
        found.sizes(folder)
    except (OrchardError, OSError):
        return None
    return found


def versions() -> dict[str, str]:
    return {"orchard": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
