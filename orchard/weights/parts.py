"""Models that come with a checkout: files cut into parts that a repository can hold, joined into the library when first named.

    weights/<name>/parts.json            what the files are, what they and every part must hash to, licence, source
    weights/<name>/<name>.orchard.00     at most 16 MB each
    weights/<name>/draft.orchard.00      a smaller model that guesses for it, where there is one; or another model's is named

The folder lies beside the package in a checkout (an editable installation has it too). A wheel does not carry it: weights are an
order of magnitude more than the code, and package indexes stop at 100 MB a file. `ORCHARD_WEIGHTS` names another folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import BadFile, DiskFull, ModelNotFound, OrchardError, UsageError
from orchard.core.files import atomic_write, disk_errors, safe_join, write_text
from orchard.core.progress import Advance, progress
from orchard.weights.mapped import json_object
from orchard.weights.names import IN_PARTS, stored_name

if TYPE_CHECKING:
    from orchard.weights.library import Entry, Library

LIST = "parts.json"
FORMAT = 1
PART_BYTES = 16_000_000
MOST_PARTS = 10_000
MOST_BYTES = 1 << 20  # of parts.json
ROLES = ("model", "draft")
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Piece:
    """A part, or a file once it is whole."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Divided:
    """A file in parts."""

    whole: Piece
    role: str
    parts: tuple[Piece, ...]
    lent: str = ""
    """The model whose folder holds the parts, where it is another one."""


@dataclass(frozen=True)
class Parcel:
    """A model in parts: the folder they lie in and what `parts.json` says. `damaged`: why it cannot be used."""

    name: str
    folder: Path
    files: tuple[Divided, ...] = ()
    licence: str = ""
    source: str = ""
    damaged: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.whole.bytes for file in self.files)

    @property
    def version(self) -> str:
        """Tells one state of its files from another."""
        return "+".join(file.whole.sha256[:12] for file in self.files)

    @property
    def draft(self) -> str:
        """The name of the draft model's file; empty where there is none."""
        return next((file.whole.name for file in self.files if file.role == "draft"), "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.folder),
            "bytes": self.bytes,
            "licence": self.licence,
            "source": self.source,
            "draft": self.draft,
            "damaged": self.damaged,
        }


# Finding --------------------------------------------------------------------------------------------------------------


def weights_folder() -> Path | None:
    """Where parts are looked for: `ORCHARD_WEIGHTS`, or `weights` beside the package in a checkout; None where there is none."""
    asked = os.environ.get("ORCHARD_WEIGHTS")
    root = Path(__file__).resolve().parents[2]
    if asked:
        found = Path(asked).expanduser()
    elif (root / "pyproject.toml").is_file():  # beside an installed package anything may be called weights
        found = root / "weights"
    else:
        return None
    return found if found.is_dir() else None


def parcels() -> list[Parcel]:
    """Every model in parts, by name; a damaged one is listed as damaged."""
    folder = weights_folder()
    with suppress(OSError):
        return [_listed(one) for one in sorted(folder.iterdir() if folder else ()) if (one / LIST).is_file()]
    return []


def parcel_named(name: str) -> Parcel | None:
    """The model in parts of that name; None where there is none. `BadFile` where its list cannot be used."""
    folder = weights_folder()
    if folder is None or "/" in name or stored_name(name) != name:
        return None
    return read_parcel(folder / name) if (folder / name / LIST).is_file() else None


def read_parcel(folder: Path) -> Parcel:
    """What a folder's `parts.json` says, checked; no part is read."""
    path = folder / LIST
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadFile(f"{path} is larger than any list of parts", hint=_again(folder.name))
        told = json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from error
    if told.get("format") != FORMAT or told.get("name") != folder.name:
        problem = f"{path} is of another version, or of another model than {folder.name}"
        raise BadFile(problem, hint=_again(folder.name))
    listed = told.get("files")
    files = [_divided(path, entry) for entry in listed] if isinstance(listed, list) else []
    roles = [file.role for file in files]
    names = [piece.name for file in files for piece in (file.whole, *file.parts)]
    if roles not in (["model"], ["model", "draft"]) or len(set(names)) != len(names):
        raise BadFile(f"{path} names no model, or something twice", hint=_again(folder.name))
    licence, source = (told[key] if isinstance(told.get(key), str) else "" for key in ("licence", "source"))
    return Parcel(folder.name, folder, tuple(files), licence, source)


def _listed(folder: Path) -> Parcel:
    try:
        return read_parcel(folder)
    except OrchardError as error:
        return Parcel(folder.name, folder, damaged=error.message)


def _divided(path: Path, entry: Any) -> Divided:
    whole = _piece(path, entry)
    listed, role = entry.get("parts"), entry.get("role")
    if role not in ROLES or not isinstance(listed, list) or not 0 < len(listed) <= MOST_PARTS:
        raise BadFile(f"{path}: {whole.name} has no role, or no parts", hint=_again(path.parent.name))
    parts = tuple(_piece(path, part) for part in listed)
    if sum(part.bytes for part in parts) != whole.bytes:
        raise BadFile(f"{path}: the parts of {whole.name} do not add up to it", hint=_again(path.parent.name))
    lent = entry.get("in", "")
    if not isinstance(lent, str) or (lent and (role != "draft" or "/" in lent or stored_name(lent) != lent)):
        raise BadFile(f"{path}: {whole.name} is said to lie where no parts can be", hint=_again(path.parent.name))
    return Divided(whole, role, parts, lent)


def _piece(path: Path, entry: Any) -> Piece:
    name, size, digest = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "bytes", "sha256"))
    if isinstance(name, str) and type(size) is int and isinstance(digest, str):
        plain = Path(name).name == name and 0 < len(name) <= 200
        if plain and 0 <= size < 1 << 48 and len(digest) == 64 and set(digest) <= _HEX:
            return Piece(name, size, digest)
    raise BadFile(f"{path} names a part without a plain name, size and SHA-256", hint=_again(path.parent.name))


def _again(name: str) -> str:
    return f"restore the folder: git checkout -- weights/{name}"


# Joining --------------------------------------------------------------------------------------------------------------


def join(library: Library, parcel: Parcel, say: Callable[[str], None] | None = None) -> Entry:
    """Put a model together in the library: whole and verified, or not at all. One that is there already, as these parts have it,
    is left as it is. Safe against other processes that do the same."""
    waiting = None if say is None else lambda: say(f"another process joins {parcel.name}; waiting for it")
    with library.lock(parcel.name, waiting):
        entry = library.find(parcel.name)  # whoever held the lock may have brought it
        if entry is None or entry.damaged or entry.version != parcel.version:
            _join(library, parcel)
            entry = library.find(parcel.name)
    assert entry is not None
    return entry


def _join(library: Library, parcel: Parcel) -> None:
    import shutil

    source, version, licence = f"{IN_PARTS}{parcel.name}", parcel.version, parcel.licence
    with library.add(parcel.name, source=source, version=version, licence=licence, draft=parcel.draft) as folder:
        free = shutil.disk_usage(folder).free
        if free < parcel.bytes:
            raise DiskFull(
                f"{parcel.bytes / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free at {library.home}",
                hint="free some disk space, or point ORCHARD_HOME at a larger disk",
            )
        with progress(f"joining {parcel.name}", total=parcel.bytes, unit="bytes") as advance:
            for file in parcel.files:
                place = parcel.folder.parent / file.lent if file.lent else parcel.folder
                _join_file(place, file, safe_join(folder, file.whole.name), advance)


def _join_file(folder: Path, file: Divided, target: Path, advance: Advance) -> None:
    import hashlib

    whole = hashlib.sha256()
    with target.open("wb") as out:
        for part in file.parts:
            own, size = hashlib.sha256(), 0
            for piece in _pieces(folder, part):
                own.update(piece)
                whole.update(piece)
                size += len(piece)
                out.write(piece)
                advance(len(piece))
            if size != part.bytes or own.hexdigest() != part.sha256:
                raise BadFile(f"{folder / part.name} does not have the SHA-256 it should", hint=_again(folder.name))
        out.flush()
        os.fsync(out.fileno())
    if whole.hexdigest() != file.whole.sha256:
        raise BadFile(f"the parts of {file.whole.name} are whole, but not in order", hint=_again(folder.name))


def _pieces(folder: Path, part: Piece) -> Iterator[bytes]:
    """A part's bytes, never more than it should have and one."""
    try:
        with safe_join(folder, part.name).open("rb") as file:
            left = part.bytes + 1
            while left and (piece := file.read(min(1 << 20, left))):
                left -= len(piece)
                yield piece
    except FileNotFoundError as error:
        raise BadFile(f"{folder / part.name} is missing", hint=_again(folder.name)) from error
    except PermissionError as error:
        raise BadFile(f"{folder / part.name} cannot be read", hint="check its permissions") from error


# Splitting ------------------------------------------------------------------------------------------------------------


def split(
    file: Path | str,
    folder: Path | str,
    name: str,
    *,
    draft: Path | str | None = None,
    draft_of: str | None = None,
    licence: str = "",
    source: str = "",
    part_bytes: int = PART_BYTES,
) -> Parcel:
    """Cut a model's file, and that of its draft, into parts below `folder/name`, with their sums: all of it, or nothing.
    `draft_of`: it has the same draft as another model there, and the parts stay with that one."""
    import shutil
    import tempfile

    if stored_name(name) != name or "/" in name:
        raise UsageError(f"{name!r} is no name for a model in parts", hint="letters, digits, '.', '_' and '-'")
    if not 0 < part_bytes <= PART_BYTES:
        raise UsageError(f"parts of {part_bytes:,} bytes", hint=f"at most {PART_BYTES:,}")
    target = Path(folder) / name
    if target.exists():
        raise UsageError(f"{target} is there already", hint="remove it first")
    if draft is not None and draft_of is not None:
        raise UsageError("a draft of its own and another model's", hint="give one of them")
    lent = [] if draft_of is None else [_lent(Path(folder) / draft_of)]
    given = [("model", Path(file)), *([("draft", Path(draft))] if draft is not None else [])]
    for _, path in given:
        if not path.is_file() or not path.stat().st_size:
            raise ModelNotFound(f"there is no file {path}, or nothing in it", hint="name the model's one file")
    with disk_errors(target):
        Path(folder).mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}.", suffix=".part"))
        try:
            files = [_split_file(path, temporary, name, role, part_bytes) for role, path in given] + lent
            told = {"format": FORMAT, "name": name, "licence": licence, "source": source, "files": files}
            write_text(temporary / LIST, json.dumps(told, indent=2) + "\n")
            temporary.chmod(0o755)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return read_parcel(target)


def _lent(folder: Path) -> dict[str, Any]:
    """The draft of another model, as its list has it."""
    other = read_parcel(folder)
    for entry in json_object((folder / LIST).read_bytes(), str(folder / LIST))["files"]:
        if entry["role"] == "draft":
            return {**entry, "in": next(file.lent for file in other.files if file.role == "draft") or other.name}
    raise UsageError(f"{folder.name} has no draft", hint="give a file")


def _split_file(path: Path, folder: Path, model: str, role: str, part_bytes: int) -> dict[str, Any]:
    import hashlib

    name = f"{model if role == 'model' else role}{path.suffix}"
    whole = hashlib.sha256()
    parts: list[dict[str, Any]] = []
    with path.open("rb") as file:
        while piece := file.read(part_bytes):
            whole.update(piece)
            part = f"{name}.{len(parts):02d}"
            with atomic_write(folder / part) as out:
                out.write(piece)
            parts.append({"name": part, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    size = sum(part["bytes"] for part in parts)
    return {"name": name, "role": role, "bytes": size, "sha256": whole.hexdigest(), "parts": parts}
