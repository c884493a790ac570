"""Files of kept beginnings: a part of the tree, whole and checked or not at all.

One line says which version this is, one is JSON: whose keys and values these are (`signature`, per variant), how many bytes
follow, and a sha256 of everything else. Then entry after entry, parents first: three numbers (parent, kind, bytes), the ids of
a block, its bytes. What was used last stands first, so that a reader with little room takes the best of it, and one pass in
small steps is enough: sizes are held against the file before room is made for anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import BadFile, UsageError
from orchard.core.files import atomic_write
from orchard.generate.prefix_tree import GRAIN, KEEPING, Entry

MAGIC = b"orchard prefix 2\n"
OLDER = (b"orchard prefix 1\n",)
WAY, BLOCK, PIECE = 0, 1, 2
"""Kinds of entries: without data, of use with those before it, of use for exactly its length."""
HEAD = 8 * 3
ROW = HEAD + 8 * GRAIN
HEADER = 1 << 20
STEP = 1 << 20

Names = list[tuple[str | None, str]]
"""Variants and their signatures."""
Fits = Callable[[str | None, tuple[int, ...], np.ndarray, bool], bool]
"""Whether an entry of a variant, ending these tokens, has the right size."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was read."""

    entries: list[Entry]
    variants: list[str | None]
    longest: int
    """Tokens of the longest beginning."""


def write(path: Path, entries: Sequence[Entry], names: Names) -> None:
    rows = [_row(entry) for entry in entries]
    sizes = [entry.data.nbytes if entry.data is not None else 0 for entry in entries]
    about = {"grain": GRAIN, "variants": names, "entries": len(rows), "bytes": len(rows) * ROW + sum(sizes)}
    known = sha256(_words(about))
    for row, entry in zip(rows, entries, strict=True):
        known.update(row)
        if entry.data is not None:
            known.update(entry.data.data)
    header = _words(about | {"sha256": known.hexdigest()})
    if len(header) >= HEADER:
        raise UsageError(f"{len(names)} variants in one file", hint="save the beginnings of fewer adapters at once")
    try:
        with atomic_write(path) as file:
            file.write(MAGIC + header + b"\n")
            for row, entry in zip(rows, entries, strict=True):
                file.write(row)
                if entry.data is not None:
                    file.write(entry.data.data)
    except OSError as error:  # a full disk has become `DiskFull`
        raise UsageError(f"{path} cannot be written: {error}", hint="name a file in a folder of your own") from error


def read(path: Path, limit: int, signatures: Callable[[str | None], str | None], fits: Fits) -> Taken:
    """The beginnings in a file that belong to variants with these signatures, at most `limit` bytes of them."""
    try:
        with path.open("rb") as file:
            about = _header(path, file)
            names: Names = [(name, signature) for name, signature in about["variants"]]
            mine = [isinstance(signature, str) and signatures(name) == signature for name, signature in names]
            if not any(mine):
                raise BadFile(f"{path} belongs to another model", hint="load it with the model that it was saved with")
            taken = _entries(file, about, mine, limit)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadFile(f"{path} is no file of keys and values: {error}", hint="save the session again") from error
    variants = [name for name, _ in names]
    return Taken(taken, variants, _checked(path, taken, variants, fits))


def _header(path: Path, file: BufferedReader) -> dict[str, Any]:
    magic = file.readline(len(MAGIC))
    if magic in OLDER:
        raise BadFile(f"{path} is of an older version of Orchard", hint="save the session again with this version")
    if magic != MAGIC:
        raise ValueError("it does not begin as one of this version")
    line = file.readline(HEADER)
    if not line.endswith(b"\n"):
        raise ValueError("its header does not end")
    about = json.loads(line)
    begin, end = file.tell(), file.seek(0, 2)
    file.seek(begin)
    if about["grain"] != GRAIN:
        raise ValueError(f"its blocks are of {about['grain']} tokens, and not of {GRAIN}")
    if about["bytes"] != end - begin or not 0 < about["entries"] <= about["bytes"] // ROW:
        raise ValueError("its length is not what it says")
    return dict(about)


def _entries(file: BufferedReader, about: dict[str, Any], mine: list[bool], limit: int) -> list[Entry]:
    """Entries of some variants as far as there is room; what follows is only held against the checksum."""
    digest = about.pop("sha256")
    known, left, room = sha256(_words(about)), about["bytes"], limit - KEEPING * sum(mine)
    taken: list[Entry] = []
    places: dict[int, int] = {}  # of entries that were taken, where they are in the file → in `taken`
    kinds = bytearray()
    for number in range(about["entries"]):
        row = file.read(ROW)
        known.update(row)
        parent, kind, size = (int(value) for value in np.frombuffer(row[:HEAD], "<i8"))
        left -= ROW + size
        if (
            len(row) < ROW
            or left < 0
            or size < 0
            or not -len(mine) <= parent < number
            or kind not in (WAY, BLOCK, PIECE)
        ):
            raise ValueError(f"entry {number} makes no sense")
        if (kind == WAY and size) or (kind == BLOCK and parent >= 0 and kinds[parent] != BLOCK):
            raise ValueError(f"entry {number} makes no sense where it is")
        kinds.append(kind)
        belongs = mine[-1 - parent] if parent < 0 else parent in places
        room -= KEEPING + size if belongs else 0
        data = _data(file, size, known, wanted=belongs and room >= 0)
        if belongs and room >= 0:
            places[number] = len(taken)
            at = places[parent] if parent >= 0 else parent
            taken.append(Entry(at, row[HEAD:], data if kind != WAY else None, kind == PIECE))
    if left or known.hexdigest() != digest:
        raise ValueError("it is damaged")
    return taken


def _data(file: BufferedReader, size: int, known: Any, wanted: bool) -> np.ndarray:
    """The next bytes, which are added to the checksum; not kept where they are not wanted."""
    data = np.empty(size if wanted else min(size, STEP), np.uint8)
    for at in range(0, size, STEP):
        part = data[at : at + STEP] if wanted else data[: size - at]
        if file.readinto(part.data) != part.nbytes:
            raise ValueError("it ends too early")
        known.update(part.data)
    return data


def _checked(path: Path, entries: Sequence[Entry], variants: Sequence[str | None], fits: Fits) -> int:
    """The longest beginning, after all sizes were found to be those of the model."""
    sizes: dict[tuple[int, int, bool], int] = {}
    ends: list[tuple[int, int]] = []  # of each entry, its variant and how many blocks it ends
    longest = 0
    for place, entry in enumerate(entries):
        variant, depth = ends[entry.parent] if entry.parent >= 0 else (-1 - entry.parent, 0)
        ends.append((variant, depth + 1))
        if entry.data is None:
            continue
        what = (variant, depth + 1 if entry.whole else 1, entry.whole)
        if what not in sizes:  # the model is asked once for each
            ids = _ids(entries, place, what[1])
            sizes[what] = entry.data.nbytes if fits(variants[variant], ids, entry.data, entry.whole) else -1
        if sizes[what] != entry.data.nbytes:
            raise BadFile(f"{path} has not the size of {GRAIN * what[1]:,} tokens", hint="save the session again")
        longest = max(longest, GRAIN * (depth + 1))
    return longest


def _ids(entries: Sequence[Entry], place: int, blocks: int) -> tuple[int, ...]:
    """The tokens of the last blocks that an entry ends."""
    keys = []
    for _ in range(blocks):
        keys.append(entries[place].key)
        place = entries[place].parent
    return tuple(np.frombuffer(b"".join(reversed(keys)), "<i8").tolist())


def _row(entry: Entry) -> bytes:
    kind = WAY if entry.data is None else PIECE if entry.whole else BLOCK
    size = entry.data.nbytes if entry.data is not None else 0
    return np.array([entry.parent, kind, size], "<i8").tobytes() + entry.key


def _words(about: dict[str, Any]) -> bytes:
    return json.dumps(about, sort_keys=True).encode()
