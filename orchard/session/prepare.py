"""From a model's own files to one packed file that the native engine maps: made once, found again by name.

`<home>/packed/<model>-<hash of its path>-<hash of its size, time and our versions>.orchard` belongs to the model at that
path as it is now. A model that changed, or a version of Orchard with another layout, asks for another name: the file is made
anew and the old one removed. Where a packed file cannot be kept, the plan is used from memory, and only the start is slower.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.digest import sha256
from orchard.core.errors import BadFile, DiskFull, OrchardError
from orchard.weights.library import home
from orchard.weights.packed import FORMAT, LAYOUT, PackedFile, write_packed

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder
    from orchard.ops.plan.steps import Plan
    from orchard.text.tokenizer import Tokenizer

Say = Callable[[str], None]
Rewrite = Callable[["Decoder.Config"], "Decoder.Config"]
ENDING = ".orchard"
BASE, EXPERTS = ".base.orchard", ".experts"
"""What replaces the ending where a model's experts lie in a file of their own: everything else, and they."""
TOKENIZER = "tokenizer."
"""Tensors of this name belong to the tokenizer, all others to the plan."""


@dataclass
class Prepared:
    """What `ready` found or made: a plan to run, or the reason why there is none."""

    plan: Plan | None = None
    tokenizer: Tokenizer | None = None
    path: Path | None = None
    """The packed file that the plan lies in; None where it is in memory only."""
    reason: str = ""
    """Why there is no plan, or no packed file."""


def packed_folder() -> Path:
    return home() / "packed"


def packed_path(source: Path) -> Path:
    """Where the packed file of a model belongs, whether it is there or not."""
    facts = _facts(source)
    named = source.suffix in (".gguf", ENDING)
    name = source.parent.name if source.stem == "model" else source.stem if named else source.name
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60].strip("-.") or "model"
    state = _hash(facts["size"], facts["mtime_ns"], FORMAT, LAYOUT)
    return packed_folder() / f"{readable}-{_hash(facts['path'])}-{state}{ENDING}"


def prepare(source: Path, *, force: bool = False, say: Say | None = None) -> Path | None:
    """Make the packed file of a model, unless it is there and whole; None where there can be none (see `ready`)."""
    return ready(source, force=force, say=say).path


def ready(source: Path, *, force: bool = False, say: Say | None = None) -> Prepared:
    """The plan and tokenizer of a model from its packed file, which is made where it is missing or of no use.

    Without the native library there is neither, and `reason` says so. `say` takes one line for a person when a file is made
    again, or cannot be kept. Errors are those of the model's own files.
    """
    from orchard.ops.kernels.native import why_not

    missing = why_not()
    if missing:
        return Prepared(reason=f"no native kernels: {missing}")
    tell = say if say is not None else _on_stderr
    path = packed_path(source)
    found = None if force else _opened(path, source, tell)
    if found is not None:
        return found
    try:
        with _alone(path):
            if not force:
                found = _opened(path, source, None)  # whoever held the lock may have made it
            return found if found is not None else _kept(path, source, tell)
    except _CannotKeep as refusal:
        tell(f"{source.name}: its packed file cannot be kept ({refusal}); it is made anew at every start")
        return made(source, reason=str(refusal))


def made(source: Path, rewrite: Rewrite | None = None, *, reason: str = "") -> Prepared:
    """The plan of a model, or of a rewritten tree of it, in memory. What cannot be lowered has no plan and says why."""
    from orchard.generate.lowering import lower
    from orchard.session.build import tokenizer_of
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.load import load_decoder
    from orchard.weights.stored import as_stored

    with open_checkpoint(source) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        tree = as_stored(checkpoint, checkpoint.config())
        decoder = load_decoder(checkpoint, rewrite(tree) if rewrite is not None else tree, dtype=None)
        try:
            plan = lower(decoder)
        except OrchardError as error:
            return Prepared(tokenizer=tokenizer, reason=f"it cannot be lowered: {error}")
    return Prepared(plan, tokenizer, reason=reason)


def forget(source: Path) -> int:
    """Remove the packed files of the model at a path; how many bytes they held."""
    return sum(_remove(path) for path in _of(source))


def packed_bytes() -> int:
    """Bytes held by all packed files."""
    total = 0
    for path in _files():
        with suppress(OSError):
            total += path.stat().st_size
    return total


# Inside -----------------------------------------------------------------------------------------------------------


class _CannotKeep(Exception):
    """The folder of packed files cannot be written, or is full."""


def _opened(path: Path, source: Path, tell: Say | None) -> Prepared | None:
    """The packed file at a path, checked; None where there is none, or none of use (and `tell` hears of it)."""
    if not path.is_file():
        if tell is not None and any(not old.name.startswith(path.stem) for old in _of(source)):
            tell(f"{source.name} changed, or was packed by another version of Orchard; packing it again")
        return None
    try:
        return open_packed(path)
    except BadFile as error:
        if tell is not None:
            tell(f"{error}; packing it again")
        return None


def open_packed(path: Path) -> Prepared:
    """Plan and tokenizer of a packed file, without torch; `BadFile` where they cannot be used."""
    from orchard.ops.plan.file import from_json
    from orchard.text.packed import unpack

    file = PackedFile.open(path)
    words = {name: array for name, array in file.tensors.items() if name.startswith(TOKENIZER)}
    tensors = {name: array for name, array in file.tensors.items() if name not in words}
    plan, tokenizer = file.header.get("plan"), file.header.get("tokenizer")
    if not isinstance(plan, dict) or not isinstance(tokenizer, dict):
        raise BadFile(f"{path} holds no plan, or no tokenizer", hint="it is made again from the model it came from")
    try:
        lowered = from_json(
            plan, tensors, _elsewhere(file.header)
        )  # checks every number, so that native code may trust it
    except OrchardError as error:
        raise BadFile(f"{path}: {error}", hint="it is made again from the model it came from") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadFile(f"{path}: its plan cannot be read: {error!r}", hint="it is made again") from error
    return Prepared(lowered, unpack(tokenizer, words, file.verify), path)


def _elsewhere(header: dict[str, Any]) -> dict[str, int]:
    """Experts' matrices that lie in a file of their own, and their bytes (session/experts.py)."""
    found = header.get("elsewhere", {})
    if not isinstance(found, dict) or not all(type(size) is int for size in found.values()):
        raise BadFile("a packed file that does not say where its experts are", hint="it is made again")
    return found


def _kept(path: Path, source: Path, tell: Say) -> Prepared:
    """Make the plan, write it, remove what it replaces, and give back the mapped file instead of what is in memory."""
    from orchard.ops.plan.file import to_json
    from orchard.text.packed import pack

    fresh = made(source)
    if fresh.plan is None or fresh.tokenizer is None:
        return fresh
    facts, words = pack(fresh.tokenizer)
    header = {"source": _facts(source), "plan": to_json(fresh.plan), "tokenizer": facts}
    try:
        write_packed(path, header, {**fresh.plan.tensors, **words})
    except (OSError, DiskFull) as error:
        fresh.reason = getattr(error, "strerror", None) or str(error)
        tell(f"{source.name}: its packed file cannot be kept ({fresh.reason}); it is made anew at every start")
        return fresh
    for old in (*_of(source), *_orphans()):
        if not old.name.startswith(path.stem):
            _remove(old)
    return open_packed(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process makes a file; the lock dies with its process."""
    from filelock import FileLock

    locks = path.parent / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(locks / f"{path.name.rsplit('-', 2)[-2]}.lock"))
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter from filelock, where a file system has no locks
        raise _CannotKeep(getattr(error, "strerror", None) or str(error)) from error
    try:
        yield
    finally:
        lock.release()


def _facts(source: Path) -> dict[str, Any]:
    """What tells one state of a model from another: where it is, how large, and when it was last changed."""
    try:
        files = [file for file in source.iterdir() if file.is_file()] if source.is_dir() else [source]
        states = [file.stat() for file in files]
    except OSError as error:
        raise BadFile(f"{source} cannot be read: {error.strerror}", hint="check the path and its rights") from error
    size, changed = sum(state.st_size for state in states), max((state.st_mtime_ns for state in states), default=0)
    return {"path": str(source.absolute()), "size": size, "mtime_ns": changed}


def _hash(*facts: object) -> str:
    return sha256(repr(facts).encode("utf-8", "surrogateescape")).hex()[:12]


def _files() -> list[Path]:
    with suppress(OSError):
        return sorted(path for ending in (ENDING, EXPERTS) for path in packed_folder().glob(f"*{ending}"))
    return []


def _of(source: Path) -> list[Path]:
    """The packed files, of any state, of the model at a path."""
    mark = f"-{_hash(str(source.absolute()))}-"
    return [path for path in _files() if mark in path.name]


def _orphans() -> Iterator[Path]:
    """Packed files of models that are no longer where they were."""
    for path in _files():
        if path.suffix == EXPERTS:
            if not path.with_name(path.name.removesuffix(EXPERTS) + BASE).is_file():
                yield path
            continue
        with suppress(OrchardError, OSError), PackedFile.open(path) as file:
            facts = file.header.get("source")
            known = facts.get("path") if isinstance(facts, dict) else None
            if isinstance(known, str) and not Path(known).exists():
                yield path


def _remove(path: Path) -> int:
    with suppress(OSError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
