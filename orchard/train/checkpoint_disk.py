"""Everything a checkpoint does to the disk, in a few functions: so that a test can break off at each of them.

The order is what makes a checkpoint atomic. Files are written and flushed to the disk inside a folder with a temporary name,
the folder's own entries are flushed, and only then is it renamed. Deleting begins with a rename too.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchard.core.errors import OrchardError
from orchard.core.files import disk_errors

GOES_ON = "checkpoints that were whole before still are; put this right and save again"
CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What some file systems say when they are asked to flush a folder."""


class CheckpointFailed(OrchardError):
    """A checkpoint could not be written or read. Earlier ones are untouched, and training may go on."""

    code = "checkpoint-failed"
    retryable = True


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """`DiskFull` where there is no room, `CheckpointFailed` for everything else the operating system can say."""
    try:
        with disk_errors(path):
            yield
    except PermissionError as error:
        raise CheckpointFailed(f"no permission to write {path}", hint=GOES_ON) from error
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise CheckpointFailed(f"{path} cannot be written: its folder is gone or no folder", hint=GOES_ON) from error
    except OSError as error:
        raise CheckpointFailed(f"{path} cannot be written: {error.strerror or error}", hint=GOES_ON) from error


def make(folder: Path) -> None:
    folder.mkdir()


def create(path: Path) -> int:
    """A new file, open for writing."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)


def put(descriptor: int, data: bytes | memoryview) -> None:
    """All of the bytes: the system may take them in several bites."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


def flush_folder(folder: Path) -> None:
    """Make new names last, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush(descriptor)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    old.rename(new)


def remove(folder: Path) -> None:
    """A folder or a file, whatever is left of it."""
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)
