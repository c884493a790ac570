"""Hugging Face model folders in and out: config.json, safetensors weights (one file or sharded), and the files beside them.

Pickled weights are refused: loading one runs whatever code its maker put into it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat, UsageError
from orchard.core.files import atomic_write, disk_errors, safe_join, write_text
from orchard.weights.mapped import AGAIN, json_object
from orchard.weights.safetensors import (
    Lazy,
    SafeTensorInfo,
    SafetensorsFile,
    announce,
    stored_bytes,
    write_safetensors,
)

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_TEXT_BYTES = 64 * 1024 * 1024  # tokenizer.json of large vocabularies reaches 35 MB
SHARD_BYTES = 5_000_000_000

_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OWN_FILES = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


class HFFolder:
    """An open folder: `config`, `tensors` (all shards together), `read(name)`, and the small files by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ModelNotFound(f"there is no folder {path}", hint="check the path")
        config = self.json(CONFIG)
        if config is None:
            raise BadFile(f"{path} has no {CONFIG}", hint="name a folder as saved by transformers, or a GGUF file")
        self.config: dict[str, Any] = config
        self._files: list[SafetensorsFile] = []
        self._owner: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, SafeTensorInfo] = {}
        try:
            self._open_weights()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path | str) -> HFFolder:
        return cls(Path(path))

    def file(self, name: str) -> Path | None:
        """The path of a file beside the weights (tokenizer.json, chat_template.jinja …), or None where there is none."""
        path = self.path / name
        return path if path.is_file() else None

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file beside the weights as a dict, or None where there is none."""
        data = self._small_file(name)
        return None if data is None else json_object(data, str(self.path / name))

    def text(self, name: str) -> str | None:
        """A text file beside the weights, or None where there is none."""
        data = self._small_file(name)
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError:
            raise BadFile(f"{self.path / name} is not UTF-8 text", hint=AGAIN) from None

    @property
    def generation_config(self) -> dict[str, Any] | None:
        return self.json("generation_config.json")

    @property
    def tokenizer_config(self) -> dict[str, Any] | None:
        return self.json("tokenizer_config.json")

    @property
    def special_tokens_map(self) -> dict[str, Any] | None:
        return self.json("special_tokens_map.json")

    @property
    def tokenizer(self) -> Path | None:
        return self.file("tokenizer.json")

    @property
    def chat_template(self) -> str | None:
        """The text of chat_template.jinja; older folders keep the template in tokenizer_config.json instead."""
        return self.text("chat_template.jinja")

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype."""
        if name not in self._owner:
            raise BadFile(f"{self.path} has no tensor {name!r}", hint="the folder may belong to another model")
        return self._owner[name].read(name)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _small_file(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            if not path.is_file():
                return None
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise BadFile(f"{path} has more than {MAX_TEXT_BYTES:,} bytes", hint="check that it is the right file")
            return path.read_bytes()
        except OSError as error:
            raise BadFile(f"{path} cannot be read: {error}", hint="check its permissions") from error

    def _open_weights(self) -> None:
        if self.file(WEIGHTS):
            self._add(SafetensorsFile.open(self.path / WEIGHTS), None)
            return
        index = self.json(INDEX)
        if index is not None:
            self._open_shards(index)
            return
        pickles = sorted(found.name for pattern in _PICKLES for found in self.path.glob(pattern))
        if pickles:
            raise UnsupportedFormat(
                f"{self.path} has only pickled weights ({pickles[0]}), and Orchard never loads pickle: it can run any code",
                hint="on a machine where you trust the file, load it with transformers and save it again with "
                "save_pretrained(), which writes safetensors",
            )
        raise BadFile(
            f"{self.path} has no {WEIGHTS} and no {INDEX}", hint="the folder is incomplete; download it again"
        )

    def _open_shards(self, index: dict[str, Any]) -> None:
        where = self.path / INDEX
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise BadFile(f"{where} has no weight_map from tensor names to file names", hint=AGAIN)
        wanted: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            wanted.setdefault(shard, []).append(name)
        for shard, names in wanted.items():
            path = _shard_path(self.path, shard)
            if not path.is_file():
                raise BadFile(f"{self.path} lacks the weights file {shard!r}", hint="download the missing file")
            self._add(SafetensorsFile.open(path), names)
        # In the order of the index, whatever the order of the shards.
        self.tensors = {name: self.tensors[name] for name in weight_map}

    def _add(self, file: SafetensorsFile, names: list[str] | None) -> None:
        self._files.append(file)
        for name in file.tensors if names is None else names:
            if name not in file.tensors:
                raise BadFile(
                    f"{self.path / INDEX} says that {file.path.name} has the tensor {name[:80]!r}, and it has not",
                    hint="the index and the weights are from different downloads; download the folder again",
                )
            self.tensors[name] = file.tensors[name]
            self._owner[name] = file


def _shard_path(folder: Path, name: str) -> Path:
    """A name from the index, kept inside its folder.

    The hub's cache keeps a snapshot's files as links into `blobs` beside `snapshots`; those links, and no others, may
    lead out of the folder.
    """
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and Path(name).name == name and (folder / name).is_symlink():
        target = (folder / name).resolve()
        if target.parent == (folder.parent.parent / "blobs").resolve():
            return target
    return safe_join(folder, name)


def write_folder(
    path: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    *,
    extra_files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads: all of it, or nothing. An existing folder must be empty."""
    path = Path(path).resolve()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(
            f"{path} already exists and is not an empty folder", hint="choose another name or remove it first"
        )
    extra_files = extra_files or {}
    clash = [name for name in extra_files if _OWN_FILES.fullmatch(name)]
    if clash:
        raise UsageError(f"{clash[0]} is written from the model itself", hint="leave it out of extra_files")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
        try:
            _fill(temporary, config, tensors, extra_files, shard_bytes)
            temporary.chmod(0o755)
            if path.exists():
                path.rmdir()
            temporary.rename(path)
            _flush_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _fill(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    extra_files: Mapping[str, bytes],
    shard_bytes: int,
) -> None:
    try:
        write_text(folder / CONFIG, json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n")
    except (TypeError, ValueError) as error:
        raise UsageError(f"the config cannot be written as JSON: {error}", hint="use plain values only") from error
    for name, data in extra_files.items():
        target = safe_join(folder, name)
        with atomic_write(target) as file:
            file.write(data)
    known = {name: announce(source) for name, source in tensors.items()}
    shards, total = _split(known, shard_bytes)
    # transformers refuses files whose metadata does not name a framework.
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS, known, {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / shard, {name: known[name] for name in names}, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, shard))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2, ensure_ascii=False) + "\n")


def _split(tensors: Mapping[str, torch.Tensor | Lazy], shard_bytes: int) -> tuple[list[list[str]], int]:
    """Fill shards in the order given; a tensor above the limit gets a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, source in tensors.items():
        size = stored_bytes(source)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    return shards, total


def _flush_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
