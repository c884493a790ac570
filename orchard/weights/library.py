"""The library: the models on this machine, one folder each, written whole or not at all.

An entry is `<home>/models/<name>/`: the model's files and `orchard.json`, which says where they came from and what they
must hash to. A new entry grows in `models/.partial/` and is renamed into place when it is whole; an old one is renamed
into `models/.trash/` before it is deleted. So a reader sees a whole entry or none, whatever is interrupted.

A name that is not here may be that of a model in parts that came with the checkout (`parts`): it is joined into the library then.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.core.errors import BadFile, ModelNotFound, UsageError
from orchard.core.files import disk_errors, safe_join, write_text
from orchard.weights.at_path import ENDINGS, model_at
from orchard.weights.names import ALIASES as ALIASES
from orchard.weights.names import DEFAULT_MODEL as DEFAULT_MODEL
from orchard.weights.names import HUB_NAME, IN_PARTS, KNOWN
from orchard.weights.names import stored_name as stored_name

RECORD = "orchard.json"
OTHER_HOME = "set ORCHARD_HOME to a folder of yours"


def home() -> Path:
    """`ORCHARD_HOME`, or `orchard` in the user's cache folder as this platform has it."""
    asked = os.environ.get("ORCHARD_HOME")
    try:
        if asked:
            return Path(asked).expanduser().absolute()
        if sys.platform == "darwin":
            cache = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            given = os.environ.get("XDG_CACHE_HOME", "")  # one that is not absolute is to be ignored, says its standard
            cache = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise UsageError("this user has no home folder to keep models in", hint=OTHER_HOME) from error
    return cache / "orchard"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model in the library. `damaged` says what is wrong with it, or is empty."""

    name: str
    path: Path
    source: str = ""
    version: str = ""
    licence: str = ""
    bytes: int = 0
    pulled: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name → {"sha256": …, "bytes": …}
    draft: str = ""
    """The file among them that is a smaller model, which guesses for this one."""
    damaged: str = ""

    @property
    def model_path(self) -> Path:
        """What a loader opens: the one GGUF or compressed file, or the folder."""
        files = [file for file in self.files if file.endswith(ENDINGS) and file != self.draft]
        return self.path / files[0] if len(files) == 1 else self.path

    @property
    def draft_path(self) -> Path | None:
        """The file of the model that guesses for this one."""
        return self.path / self.draft if self.draft in self.files else None

    def verify(self, advance: Callable[[float], None] | None = None) -> str:
        """What is wrong with the files, by their SHA-256; empty when they are whole."""
        if self.damaged:
            return self.damaged
        for file, expected in self.files.items():
            try:
                found = sha256_of(safe_join(self.path, file), advance)
            except OSError as error:
                return f"{file} cannot be read: {error.strerror}"
            if found != expected["sha256"]:
                return f"{file} does not have the SHA-256 it was pulled with"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "source": self.source,
            "version": self.version,
            "licence": self.licence,
            "bytes": self.bytes,
            "pulled": self.pulled,
            "files": self.files,
            "draft": self.draft,
            "damaged": self.damaged,
        }


Entries = list[Entry]  # inside the class below, `list` is its method


class Library:
    """The models under one home folder."""

    def __init__(self, where: Path | str | None = None) -> None:
        self.home = Path(where) if where is not None else home()
        self.models = self.home / "models"

    def list(self) -> Entries:
        """Every entry, by name; a damaged one is listed as damaged."""
        with _usable_home(self.home, "read"):
            folders = sorted(self.models.iterdir()) if self._is_there() else []
            return [_read(folder) for folder in folders if folder.is_dir() and not folder.name.startswith(".")]

    def find(self, name: str) -> Entry | None:
        folder = self._folder(name)
        with _usable_home(self.home, "read"):
            return _read(folder) if self._is_there() and folder.is_dir() else None

    def _is_there(self) -> bool:
        """Whether the library has been begun; a file where it should be is an error, not an empty library."""
        if self.models.is_dir():
            return True
        nearest = next(path for path in (self.models, *self.models.parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        return False

    def resolve(self, name_or_path: str | Path) -> Path:
        """The file or folder to open for a library name, a GGUF or compressed file, or a Hugging Face folder. A model that came
        with the checkout in parts is joined into the library first."""
        text = str(name_or_path)
        looks_like_path = isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or Path(text).is_absolute()
        if not looks_like_path:
            with suppress(UsageError):
                entry = self._joined(text, self.find(text))
                if entry is not None:
                    return _usable(entry)
        found = model_at(Path(text)) if text else None
        if found is not None:
            return found
        if looks_like_path or (text.endswith(ENDINGS) and ":" not in text):
            raise ModelNotFound(f"no file or folder at {text}", hint="check the path, or see `orchard list`")
        raise ModelNotFound(f"no model called {text!r} in the library", hint=self._nearest(text))

    def draft_of(self, path: Path) -> Path | None:
        """The model that guesses for the one at a path that `resolve` gave, where its entry has one."""
        entry = _read(path.parent) if path.parent.parent == self.models else None
        return None if entry is None or entry.damaged else entry.draft_path

    def _joined(self, name: str, entry: Entry | None) -> Entry | None:
        """An entry as the checkout's parts have it, where there are such: new, mended, or of their present state."""
        if entry is not None and not entry.source.startswith(IN_PARTS):
            return entry
        from orchard.weights.parts import join, parcel_named

        parcel = parcel_named(entry.name if entry is not None else name)
        if parcel is None or (entry is not None and not entry.damaged and entry.version == parcel.version):
            return entry
        return join(self, parcel)

    def remove(self, name: str, waiting: Callable[[], None] | None = None) -> Entry:
        """Delete an entry, whole or damaged; what was left of an interrupted pull goes too."""
        folder = self._folder(name)
        partial = self.models / ".partial" / folder.name
        missing = ModelNotFound(f"no model called {name!r} in the library", hint=self._nearest(name))
        if self.find(name) is None and not partial.is_dir():
            raise missing
        with self.lock(name, waiting), _usable_home(self.home, "changed"):
            found = [path for path in (folder, partial) if path.is_dir()]  # a pull that was running may have ended
            if not found:
                raise missing
            left = Entry(name=name, path=partial, bytes=bytes_in(partial), damaged="an interrupted pull")
            entry = self.find(name) or left
            for path in found:
                self._move_to_trash(path)
            self._empty_trash(held=folder.name)
        return entry

    @contextmanager
    def lock(self, name: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """One writer a name, across processes; the lock dies with its process. `waiting` is called when it is held."""
        from filelock import FileLock, Timeout

        locks = self.models / ".locks"
        lock = FileLock(str(locks / f"{stored_name(name)}.lock"))
        with _usable_home(self.home, "written"), disk_errors(locks):
            locks.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if waiting:
                    waiting()
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def add(
        self,
        name: str,
        *,
        source: str,
        version: str = "",
        licence: str = "",
        draft: str = "",
        keep_partial: bool = False,
    ) -> Iterator[Path]:
        """A folder to fill; at the end it becomes the entry `name`, in place of an older one. Call it under `lock`. `draft` is
        the file in it that guesses for the model.

        When the block fails the folder is removed, or with `keep_partial` kept, so that the next attempt can resume.
        """
        import shutil

        folder = self._folder(name)
        partial = self.models / ".partial" / folder.name
        if partial.exists() and not keep_partial:
            shutil.rmtree(partial)
        with disk_errors(partial):
            partial.mkdir(parents=True, exist_ok=True)
            try:
                yield partial
                _write_record(partial, name=name, source=source, version=version, licence=licence, draft=draft)
                self._put_in_place(partial, folder)
            except BaseException:
                if not keep_partial:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        self._empty_trash(held=folder.name)

    def leftovers(self) -> int:
        """Bytes held by interrupted pulls and removals."""
        return bytes_in(self.models / ".partial") + bytes_in(self.models / ".trash")

    def unfinished(self) -> tuple[str, ...]:
        """Names of pulls that were interrupted, or are running now."""
        with suppress(OSError):
            return tuple(sorted(path.name.replace("--", "/", 1) for path in (self.models / ".partial").iterdir()))
        return ()

    def _folder(self, name: str) -> Path:
        return self.models / stored_name(name)  # a checked name cannot leave the folder; a link put there by hand may

    def _put_in_place(self, partial: Path, folder: Path) -> None:
        old = self._move_to_trash(folder) if folder.exists() else None
        try:
            partial.rename(folder)
        except BaseException:
            if old is not None:
                old.rename(folder)
            raise

    def _move_to_trash(self, folder: Path) -> Path:
        trash = self.models / ".trash"
        trash.mkdir(parents=True, exist_ok=True)
        return folder.rename(trash / f"{folder.name}~{os.urandom(4).hex()}")

    def _empty_trash(self, *, held: str) -> None:
        """Delete what nobody is working on: the trash of `held`, whose lock is ours, and of every name not locked."""
        from filelock import FileLock, Timeout

        for path in (self.models / ".trash").glob("*~*"):
            name = path.name.rpartition("~")[0]
            if name == held:
                _delete(path)
                continue
            lock = FileLock(str(self.models / ".locks" / f"{name}.lock"))
            with suppress(Timeout, OSError), lock.acquire(timeout=0):
                _delete(path)

    def _nearest(self, name: str) -> str:
        import difflib

        from orchard.weights.parts import parcels

        here = sorted({entry.name for entry in self.list()} | {parcel.name for parcel in parcels()})
        close = difflib.get_close_matches(name.lower(), here, n=3, cutoff=0.6)
        if close:
            return f"did you mean {' or '.join(close)}? `orchard list` shows what is here"
        known = difflib.get_close_matches(name.lower(), [*KNOWN, *ALIASES], n=1, cutoff=0.6)
        if known:
            return f"get it with `orchard pull {ALIASES.get(known[0], known[0])}`"
        if HUB_NAME.fullmatch(name):
            return f"get it with `orchard pull {name}`, or see `orchard list`"
        return f"`orchard list` shows what is here; `orchard pull {DEFAULT_MODEL}` gets the default model"


@contextmanager
def _usable_home(place: Path, done: str) -> Iterator[None]:
    """What the system refuses becomes one clear line."""
    try:
        yield
    except OSError as error:
        hint = f"check its permissions, or {OTHER_HOME}"
        raise BadFile(f"the library at {place} cannot be {done}: {error.strerror or error}", hint=hint) from error


def sha256_of(path: Path, advance: Callable[[float], None] | None = None) -> str:
    """The SHA-256 of a file, read in pieces; `advance` is told how many bytes were read."""
    import hashlib  # here, as others elsewhere: a start needs none of them, and they bring megabytes

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            if advance:
                advance(len(piece))
    return digest.hexdigest()


def _delete(path: Path) -> None:
    import shutil

    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def bytes_in(folder: Path, suffix: str = "") -> int:
    """The bytes of the files below a folder, as far as they are there: others may be at work in it."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += Path(parent, file).stat().st_size if file.endswith(suffix) else 0
    return total


def _write_record(folder: Path, *, name: str, source: str, version: str, licence: str, draft: str = "") -> None:
    from datetime import UTC, datetime

    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    record = {
        "name": ALIASES.get(name.lower(), name),
        "source": source,
        "version": version,
        "licence": licence,
        "bytes": sum(file["bytes"] for file in files.values()),
        "pulled": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
        **({"draft": draft} if draft else {}),
    }
    write_text(folder / RECORD, json.dumps(record, indent=2) + "\n")


def _read(folder: Path) -> Entry:
    """The entry in a folder; anything wrong becomes `damaged`, so that `list` and `rm` always work."""
    name = folder.name.replace("--", "/", 1)
    here = bytes_in(folder)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = {
            str(file): {"sha256": str(f["sha256"]), "bytes": int(f["bytes"])} for file, f in record["files"].items()
        }
        text = {key: str(record.get(key, "")) for key in ("source", "version", "licence", "pulled", "draft")}
        if stored_name(str(record["name"])) != folder.name:
            raise ValueError(f"it names another model, {record['name']!r}")
    except FileNotFoundError:
        return Entry(name=name, path=folder, bytes=here, damaged=f"{RECORD} is missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        return Entry(name=name, path=folder, bytes=here, damaged=f"{RECORD} cannot be read: {error}")
    damaged = _first_fault(folder, files)
    total = sum(file["bytes"] for file in files.values())
    return Entry(name=str(record["name"]), path=folder, bytes=total, files=files, damaged=damaged, **text)


def _first_fault(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    if not files:
        return "it holds no files"
    for file, expected in files.items():
        try:
            size = safe_join(folder, file).stat().st_size
        except FileNotFoundError:
            return f"{file} is missing"
        except (OSError, BadFile) as error:
            return f"{file} cannot be read: {error}"
        if size != expected["bytes"]:
            return f"{file} has {size:,} bytes instead of {expected['bytes']:,}"
    return ""


def _usable(entry: Entry) -> Path:
    if entry.damaged:
        hint = f"get it again with `orchard pull {entry.name}`, or `orchard rm {entry.name}`"
        raise BadFile(f"{entry.name} is damaged: {entry.damaged}", hint=hint)
    return entry.model_path
