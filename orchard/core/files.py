"""Files are written whole or not at all, and a name from outside never leaves its folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orchard.core.errors import BadFile, DiskFull


def safe_join(folder: Path, name: str) -> Path:
    """`folder / name`, refused when `name` is absolute, empty, or climbs out of `folder` (links followed)."""
    base = folder.resolve()
    if not name or "\x00" in name or Path(name).is_absolute():
        raise BadFile(f"{name!r} is not a usable file name", hint="names must be relative and inside their folder")
    try:
        joined = (base / name).resolve()
    except (ValueError, OSError) as error:
        raise BadFile(f"{name!r} is not a usable file name", hint="the file that names it is damaged") from error
    if joined == base or not joined.is_relative_to(base):
        raise BadFile(f"{name!r} leads out of its folder", hint="the file that names it is damaged or hostile")
    return joined


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into `DiskFull`; other operating-system errors pass through."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"no room to write {path}", hint="free some disk space and run the command again") from error
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it to disk and rename it, otherwise remove it."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.part")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # the user's umask applies
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
