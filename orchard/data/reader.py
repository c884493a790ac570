"""What all readers share: one file after the other, a place in it, and what happens to rows that are no good."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from orchard.data.errors import BadSample, StateError, Tally
from orchard.data.files import find, fingerprint, reading
from orchard.data.source import Row, Stage, State


class Cursor(Protocol):
    """A place in one file."""

    at: list[int]
    """Where the next row begins, as plain numbers."""

    def take(self) -> Row | None:
        """The next row; None at the end. A row that is no good is raised, and the cursor is behind it."""
        ...

    def close(self) -> None: ...


class Reader(Stage[Row]):
    """Files in their order. `_open` makes a cursor for one."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, paths: Any, on_bad: str, **settings: Any) -> None:
        super().__init__(tally=Tally(on_bad), **settings)
        self.files = find(paths, self.suffixes)
        self._mark = fingerprint(self.files)
        self._cursor: Cursor | None = None
        self._epoch = 0
        self._number = 0
        self._at: list[int] | None = None

    def __next__(self) -> Row:
        while self._number < len(self.files):
            path = self._path(self._number)
            if self._cursor is None:
                with reading(path):
                    self._cursor = self._open(path, self._at)
            row = self._next_of(self._cursor, path)
            if row is not None:
                return row
            self.close()
            self._number, self._at = self._number + 1, None
        raise StopIteration

    def _next_of(self, cursor: Cursor, path: Path) -> Row | None:
        while True:
            try:
                with reading(path):
                    return cursor.take()
            except BadSample as error:
                self._leave_out(error)

    def _leave_out(self, error: BadSample) -> None:
        assert self.tally is not None
        self.tally.add(error)

    def _path(self, number: int) -> Path:
        return self.files[number]

    @abstractmethod
    def _open(self, path: Path, at: list[int] | None) -> Cursor:
        """A file, at its beginning or at a place that a cursor of it gave."""

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _own(self) -> State:
        at = self._cursor.at if self._cursor is not None else self._at
        return {
            "files": self._mark,
            "epoch": self._epoch,
            "file": self._number,
            "at": at and list(at),
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        if state["files"] != self._mark:
            raise StateError(
                f"the files at {self.files[0].parent} are not those of the state (other names, sizes or order)",
                hint="put the same files there, or begin a new run",
            )
        self.close()
        self._epoch, self._number, self._at = int(state["epoch"]), int(state["file"]), state["at"]

    def _reset(self, epoch: int) -> None:
        self.close()
        self._epoch, self._number, self._at = epoch, 0, None
