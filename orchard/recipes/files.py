"""Paths become sources: which reader a file wants, and the stages between rows and batches that recipes share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.data.batches import Batches
from orchard.data.encode import Encode
from orchard.data.files import find
from orchard.data.jsonl import Jsonl
from orchard.data.order import Repeat, Shuffle
from orchard.data.packing import Pack
from orchard.data.parquet import Parquet
from orchard.data.prefetch import Prefetch
from orchard.data.text import Text

READERS: dict[str, Any] = {"jsonl": Jsonl, "text": Text, "parquet": Parquet}
SHUFFLED = 256
"""Rows that are mixed where a file is only read from front to back."""


def rows_of(paths: str | Sequence[str], *, seed: int, split: str = "file") -> BaseConfig:
    """The reader for files of one kind, every row once an epoch in an order of its own. `split`: documents of text files."""
    named = [paths] if isinstance(paths, str) else list(paths)
    if not named:
        raise UsageError("there is nothing to learn from", hint="name a file or folder of .jsonl, .parquet or .txt")
    kinds = {kind_of(path): path for path in named}
    if len(kinds) > 1:
        (one, first), (other, second), *_ = kinds.items()
        raise UsageError(
            f"{first} holds {one} and {second} holds {other}",
            hint="give files of one kind, or mix them in Python (Mix)",
        )
    kind, given = next(iter(kinds)), named[0] if len(named) == 1 else named
    if kind == "parquet":
        return Shuffle.Config(source=Parquet.Config(paths=given), buffer=SHUFFLED, seed=seed)
    if kind == "text":
        return Text.Config(paths=given, split=split, order="shuffled", seed=seed)
    if any(path.endswith(".gz") for path in named):  # a packed file cannot be jumped about in
        return Shuffle.Config(source=Jsonl.Config(paths=given), buffer=SHUFFLED, seed=seed)
    return Jsonl.Config(paths=given, order="shuffled", seed=seed)


def kind_of(path: str) -> str:
    """jsonl, text or parquet, by the ending of a file or pattern, or by what a folder holds."""
    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted({kind for file in place.rglob("*") if (kind := _by_ending(file.name)) and file.is_file()})
        if len(found) > 1:
            raise UsageError(
                f"{path} holds files of several kinds: {', '.join(found)}", hint=f"name one kind: '{path}/**/*.jsonl'"
            )
        if not found:
            raise UsageError(f"{path} holds no .jsonl, .parquet or .txt files", hint="name another folder")
        return found[0]
    kind = _by_ending(place.name)
    if not kind:
        raise UsageError(
            f"{path} is no file or folder that can be read" if not place.exists() else f"{path} has an unknown ending",
            hint="names end in .jsonl, .parquet, .txt or .md (also .gz)",
        )
    return kind


def batches(
    rows: BaseConfig,
    *,
    count: int,
    length: int,
    mode: str = "packed",
    too_long: str = "stop",
    turns: str = "all",
    multiple: int = 0,
    epochs: int | None = None,
) -> Prefetch.Config:
    """Batches of `count` rows of `length` tokens, without end unless `epochs` says so, made ahead of the model."""
    samples = Encode.Config(source=Repeat.Config(source=rows, epochs=epochs), turns=turns)
    packed = Pack.Config(source=samples, length=length, mode=mode, too_long=too_long)
    return Prefetch.Config(source=Batches.Config(source=packed, rows=count, multiple=multiple))


def measured(
    paths: str | Sequence[str] | None, *, count: int, length: int, turns: str = "all", **options: Any
) -> dict[str, BaseConfig]:
    """What is held out, as `Trainer.Config.held_out` takes it: the first rows of some files, always the same."""
    if paths is None:
        return {}
    samples = Encode.Config(source=_in_order(rows_of(paths, seed=0)), turns=turns)
    packed = Pack.Config(source=samples, length=length, **options)
    first = paths if isinstance(paths, str) else paths[0]
    return {Path(first).name.partition(".")[0] or "files": Batches.Config(source=packed, rows=count)}


def leave_out_bad(source: BaseConfig, on_bad: str) -> None:
    """Set what happens at rows that are no good, everywhere in a source's tree."""
    for _, node in source.walk():
        if hasattr(node, "on_bad"):
            node.on_bad = on_bad


def refuse_missing(source: BaseConfig) -> None:
    """Say that files are not there before anything is loaded for them."""
    for _, node in source.walk():
        if hasattr(node, "paths") and node.builds is not None and hasattr(node.builds, "suffixes"):
            find(node.paths, node.builds.suffixes)


def _in_order(rows: BaseConfig) -> BaseConfig:
    if isinstance(rows, Shuffle.Config):
        return rows.source
    return rows.clone(order="file")


def _by_ending(name: str) -> str:
    plain = name.removesuffix(".gz")
    return next((kind for kind, reader in READERS.items() if plain.endswith(reader.suffixes)), "")
