"""JSON lines: one row a line, in the forms of `orchard.data.rows`. Streams; or in another order every epoch, from an index.

The index holds where each line begins: eight bytes a line, made by one pass over the bytes, without parsing. It is only made
where it is asked for (`order="shuffled"`); a stream needs a line's worth of memory.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError
from orchard.data.errors import BadSample, at_least, check_choice
from orchard.data.files import is_packed, open_at, reading
from orchard.data.order import Permutation
from orchard.data.reader import Cursor, Reader
from orchard.data.rows import asked, checked
from orchard.data.source import Row, State
from orchard.text.tokenizer import Tokenizer

_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_MOST_OPEN = 16
_FORMS: dict[str, Callable[[Any, str], dict[str, Any]]] = {"samples": checked, "prompts": asked}


class Jsonl(Reader):
    """Rows of `.jsonl` files."""

    suffixes = (".jsonl", ".ndjson")

    @config
    class Config(BaseConfig):
        paths: str | Sequence[str] = REQUIRED
        """Files, folders, patterns."""
        on_bad: str = "stop"
        """`stop` at a row that is no good, or `skip` and count it."""
        order: str = "file"
        """`file`, or `shuffled`: every row once an epoch, in an order of its own."""
        seed: int = 0
        longest: int = 16 << 20
        """Bytes of a line; a longer one is no good, and is never held in memory."""
        form: str = "samples"
        """Rows to learn from, or `prompts`: rows to be answered, with all their fields."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("order", cfg.order, ("file", "shuffled"))
        check_choice("form", cfg.form, tuple(_FORMS))
        at_least("longest", cfg.longest, 2)
        self._index: _Index | None = None
        self._order: Permutation | None = None
        super().__init__(cfg.paths, cfg.on_bad, order=cfg.order, seed=cfg.seed, longest=cfg.longest)
        self.cfg = cfg
        self._given = 0

    def __next__(self) -> Row:
        if self.cfg.order == "file":
            return super().__next__()
        if self._index is None:
            self._index = _Index(self.files)
        if self._order is None:
            self._order = Permutation(len(self._index), self.cfg.seed, "jsonl", self._epoch)
        while self._given < len(self._index):
            number = self._order[self._given]
            self._given += 1
            row = self._row(self._index, number)
            if row is not None:
                return row
        raise StopIteration

    def _row(self, index: _Index, number: int) -> Row | None:
        path, offset, line = index.place(number)
        with reading(path):
            file = index.open(path)
            file.seek(offset)
            data = file.readline(self.cfg.longest + 1)
        try:
            return parsed(data, f"{path}:{line}", self.cfg.longest, first=line == 1, check=_FORMS[self.cfg.form])
        except BadSample as error:
            self._leave_out(error)
            return None

    def _open(self, path: Path, at: list[int] | None) -> Cursor:
        return _Lines(path, at or [0, 1], self.cfg.longest, _FORMS[self.cfg.form])

    def _own(self) -> State:
        return super()._own() | ({"given": self._given} if self.cfg.order == "shuffled" else {})

    def _take(self, state: Mapping[str, Any]) -> None:
        super()._take(state)
        self._given, self._order = int(state.get("given", 0)), None

    def _reset(self, epoch: int) -> None:
        super()._reset(epoch)
        self._given, self._order = 0, None

    def close(self) -> None:
        super().close()
        if self._index is not None:
            self._index.close()


class _Lines:
    """`at`: bytes before the next line, and its number."""

    def __init__(
        self, path: Path, at: list[int], longest: int, check: Callable[[Any, str], dict[str, Any]] = checked
    ) -> None:
        self.path, self.at, self.longest, self.check = path, list(at), longest, check
        self.file = open_at(path, at[0])

    def take(self) -> Row | None:
        while True:
            data = self.file.readline(self.longest + 1)
            if not data:
                return None
            line = self.at[1]
            self.at = [self.at[0] + len(data) + self._rest(data), line + 1]
            row = parsed(data, f"{self.path}:{line}", self.longest, first=line == 1, check=self.check)
            if row is not None:
                return row

    def _rest(self, data: bytes) -> int:
        """Walk over what is left of a line that is too long: how many bytes that was."""
        passed = 0
        while len(data) > self.longest and not data.endswith(b"\n"):
            more = self.file.readline(_CHUNK)
            passed += len(more)
            if not more or more.endswith(b"\n"):
                break
        return passed

    def close(self) -> None:
        self.file.close()


class _Index:
    """Where every line of every file begins."""

    def __init__(self, files: list[Path]) -> None:
        packed = next((file for file in files if is_packed(file)), None)
        if packed is not None:
            raise ConfigError(f"{packed} is packed: its lines have no places", hint="unpack it, or use Shuffle over it")
        self.files = files
        self.starts = array("Q")
        self.first: list[int] = []
        for file in files:
            self.first.append(len(self.starts))
            self._scan(file)
        self._handles: dict[Path, IO[bytes]] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def _scan(self, path: Path) -> None:
        at, ended = 0, True
        with reading(path), path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                if ended:
                    self.starts.append(at)
                breaks = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10).astype(np.uint64) + np.uint64(at + 1)
                at += len(chunk)
                ended = chunk.endswith(b"\n")
                self.starts.frombytes((breaks[:-1] if ended else breaks).tobytes())

    def place(self, number: int) -> tuple[Path, int, int]:
        file = bisect_right(self.first, number) - 1
        return self.files[file], self.starts[number], number - self.first[file] + 1

    def open(self, path: Path) -> IO[bytes]:
        if path not in self._handles:
            if len(self._handles) >= _MOST_OPEN:
                self.close()
            self._handles[path] = path.open("rb")
        return self._handles[path]

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()


def parsed(
    data: bytes,
    place: str,
    longest: int,
    *,
    first: bool,
    check: Callable[[Any, str], dict[str, Any]] = checked,
) -> Row | None:
    """The row of a line; None for an empty line. `first`: a byte order mark may come before it; `check`: which form it has."""
    if len(data) > longest:
        raise BadSample(f"the line is longer than {longest:,} bytes", reason="line-too-long", place=place)
    data = (data.removeprefix(_BOM) if first else data).strip()
    if not data:
        return None
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise BadSample(f"the line is not UTF-8 (byte {error.start})", reason="not-utf8", place=place) from None
    except (ValueError, RecursionError) as error:
        detail = str(error)[:100] if isinstance(error, ValueError) else "nested too deeply"
        raise BadSample(f"the line is not JSON: {detail}", reason="not-json", place=place) from None
    return Row(check(value, place), place)
