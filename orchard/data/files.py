"""Which files, and their bytes: names, folders and patterns become a list of files; `.gz` is unpacked on the way."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from orchard.core.digest import sha256
from orchard.core.errors import BadFile, UsageError


def find(paths: str | Path | Sequence[str | Path], suffixes: Sequence[str]) -> list[Path]:
    """The files, in the order given and sorted by name within a folder or pattern; each once.

    A folder gives the files below it that end in one of the suffixes (also with `.gz`), hidden ones left out; a file that is
    named is taken whatever it is called.
    """
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    found: dict[Path, None] = {}
    for name in named:
        files = _expand(Path(name).expanduser(), tuple(suffixes))
        if not files:
            raise UsageError(f"no files at {name}", hint=f"name files, folders with {' '.join(suffixes)}, or a pattern")
        found.update(dict.fromkeys(files))
    if not found:
        raise UsageError("no files are named", hint="set paths")
    return list(found)


def _expand(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        every = (*suffixes, *(suffix + ".gz" for suffix in suffixes))
        inside = (file for file in path.rglob("*") if file.name.endswith(every) and file.is_file())
        return sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
    wild = next((i for i, part in enumerate(path.parts) if any(mark in part for mark in "*?[")), None)
    if wild is None:
        return []
    pattern = str(Path(*path.parts[wild:]))
    return sorted(file for file in Path(*path.parts[:wild]).glob(pattern) if file.is_file())


def is_packed(path: Path) -> bool:
    return path.suffix == ".gz"


def open_at(path: Path, offset: int = 0) -> IO[bytes]:
    """The bytes from `offset` on. In a packed file places are those of the unpacked bytes, and going to one means unpacking
    what is before it; nothing of it is kept."""
    with reading(path):
        file = cast(IO[bytes], gzip.GzipFile(path, "rb") if is_packed(path) else path.open("rb"))
        file.seek(offset)
        return file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A file that cannot be read is a `BadFile`; that is never skipped, because what follows in it is lost too."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"{path}: cannot be read: {error}", hint="the file is damaged, locked or gone") from error


def fingerprint(files: Sequence[Path]) -> str:
    """Names (without folders, so that data may move) and sizes. Other files would give another stream."""
    with reading(files[0]):
        facts = [f"{file.name}\0{file.stat().st_size}" for file in files]
    return sha256("\0".join(facts).encode()).hex()[:32]
