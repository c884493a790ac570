"""How `torch.distributed.checkpoint` reads and writes our folders: safetensors and JSON where its own storage pickles.

Each process writes two files: the model's weights under their own names, and everything else. Parts of tensors that are shared
out over processes carry their offset in their key. Planning (who writes what, which parts are read to fill which) is torch's.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from orchard.core.errors import ConfigError
from orchard.core.files import safe_join
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint_manifest import Manifest, Stored, describe
from orchard.train.checkpoint_tensors import Piece, TensorFile, write_tensors
from orchard.train.state import MODEL


class Writer(StorageWriter):
    """Writes into a new folder, which the first process makes. `document` is what goes into the manifest besides tensors."""

    def __init__(self, folder: Path, *, step: int = 0, rank: int = 0, document: dict[str, Any] | None = None) -> None:
        self.folder, self.step, self.rank = Path(folder), step, rank
        self.document = document or {}
        self._together: dict[str, Any] = {}
        self._processes = 1

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank", self.rank)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self.document)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._together, self._processes = merge([plan.storage_data or {} for plan in plans]), len(plans)
        with disk.disk(self.folder):
            disk.make(self.folder)
        return [dataclasses.replace(plan, storage_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: dict[str, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            kind = "model" if item.index.fqn.startswith(MODEL) else "state"
            files[f"{kind}-{self.rank:05d}.safetensors"].append(item)
        results = []
        for file, items in files.items():
            path = self.folder / file
            with disk.disk(path):
                size, digest = write_tensors(path, [_piece(item, planner) for item in items])
            results += [
                WriteResult(item.index, item.tensor_storage_size() or 0, Stored(file, _key(item), size, digest))
                for item in items
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Stored] = {result.index: result.storage_data for some in results for result in some}
        files = {place.file: {"bytes": place.bytes, "sha256": place.sha256} for place in places.values()}
        with disk.disk(self.folder):
            tensors = describe(metadata, places)
            Manifest(self.step, self._processes, tensors, files, **self._together).write(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads a folder that `Writer` wrote. Checksums are for the caller: see `Manifest.verify`."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = manifest
        self._places: dict[MetadataIndex, Stored] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder, self.manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.manifest is None:
            self.manifest = Manifest.read(self.folder)
        return self.manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        open_files: dict[str, TensorFile] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            if place.file not in open_files:
                open_files[place.file] = TensorFile(safe_join(self.folder, place.file))
            part = cut(open_files[place.file].read(place.key), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def cut(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


def merge(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document from those of all processes: plain values are the first one's, parameters are everybody's."""
    first = json.loads(json.dumps(documents[0]))
    optimizer = first.get("optimizer", {})
    for other in documents[1:]:
        first.setdefault("aliases", {}).update(other.get("aliases", {}))
        theirs = other.get("optimizer", {})
        if theirs.get("kind") != optimizer.get("kind"):
            raise ConfigError("processes have different optimisers", hint="build all of them from one config")
        for key in ("parameters", "values", "layout"):
            optimizer.setdefault(key, {}).update(theirs.get(key, {}))
    return first


def _piece(item: WriteItem, planner: SavePlanner) -> Piece:
    assert item.tensor_data is not None, item.index.fqn

    def tensor() -> Tensor:
        found = planner.resolve_data(item)
        assert isinstance(found, Tensor), item.index.fqn
        return found

    about = item.tensor_data
    assert about.chunk is not None
    return Piece(_key(item), about.properties.dtype, torch.Size(about.chunk.sizes), tensor)


def _key(item: WriteItem) -> str:
    """The tensor's name; where it is a part, with its offset."""
    about = item.tensor_data
    assert about is not None and about.chunk is not None
    name = item.index.fqn.removeprefix(MODEL)
    return name if about.chunk.sizes == about.size else name + "@" + ",".join(map(str, about.chunk.offsets))
