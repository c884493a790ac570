"""Where an export goes: a place beside the target until it may have its name, and nothing at all if it never does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchard.core.errors import DiskFull, UsageError
from orchard.core.files import disk_errors

FILES = {"gguf": ".gguf", "orchard": ".orchard"}
"""Formats that are one file, and how its name ends."""
SIGNS = {"hf": ("config.json",), "peft": ("adapter_config.json",)}
"""What a folder must hold to be one that an export may replace."""


class Placed:
    """`path` is where to write; `keep()` gives it the target's name."""

    def __init__(self, folder: Path, target: Path, force: bool) -> None:
        self.folder, self.target, self.force = folder, target, force
        self.path = folder / target.name

    def need(self, size: int) -> None:
        """Refuse work for which there is no room, before it is done."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise DiskFull(
                f"{self.target.parent} has {free:,} bytes left, and {size:,} are to be written",
                hint="free some disk space, or choose a smaller --type",
            )

    def keep(self) -> None:
        """Nothing is at the target, or what may be replaced: it goes aside first, and back if the new one cannot come."""
        aside = self.folder / "before"
        there = os.path.lexists(self.target)
        if there and not self.force and not is_empty_folder(self.target):  # somebody was quicker
            raise _taken(self.target)
        if there:
            self.target.rename(aside)
        try:
            self.path.rename(self.target)
        except BaseException:
            if there:
                aside.rename(self.target)
            raise


@contextmanager
def placed(target: Path, force: bool) -> Iterator[Placed]:
    """A folder beside the target, gone at the end, with whatever is still in it. What the system refuses is said in words."""
    try:
        with disk_errors(target):
            folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:200]}.", suffix=".part"))
            try:
                yield Placed(folder, target, force)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error.strerror or error}", hint="check the folder, its permissions and the disk"
        ) from error


def check_target(target: Path, format: str, force: bool, sources: Sequence[Path]) -> None:
    """Refuse a target that cannot be, is there already, or is what is read from."""
    ending = FILES.get(format, "")
    if (target.suffix if target.suffix in FILES.values() else "") != ending:
        what = f"its name ends in {ending}" if ending else "a folder's name does not end like a model file's"
        raise UsageError(f"{target.name} for --format {format}", hint=what)
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}", hint="make it first")
    real = target.resolve()
    for source in (source.resolve() for source in sources):
        if real == source or real in source.parents or source in real.parents:
            raise UsageError(f"{target} is what is read from, or around it, or in it", hint="choose another place")
    if not os.path.lexists(target) or (not ending and is_empty_folder(target)):
        return
    if not force:
        raise _taken(target)
    known = target.is_file() if ending else any((target / sign).is_file() for sign in SIGNS[format])
    if not known:
        kind = "a file" if ending else {"hf": "a model folder", "peft": "an adapter's folder"}[format]
        raise UsageError(f"{target} is not {kind}, so it is not replaced", hint="choose another name")


def _taken(target: Path) -> UsageError:
    return UsageError(f"{target} is there already", hint="choose another name, or replace it with --force")


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
