"""Batches of a fixed number of rows, of which each process of a run takes its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from orchard.core.errors import ConfigError, UsageError
from orchard.data.source import Stage, State

T = TypeVar("T")


class Shares(Stage[T]):
    """A stage that gives batches of `rows` rows over all processes, and counts them. All processes walk the same stream, so a
    state is the same whoever took it, and a run may go on with another number of them."""

    def __init__(self, rows: int, sources: Sequence[Any] = (), **settings: Any) -> None:
        super().__init__(sources, **settings)
        self.rows = rows
        self.given = 0
        self.rank, self.world = 0, 1

    def shard(self, rank: int, world: int) -> Self:
        """From now on only the rows of one process of `world`."""
        if not 0 <= rank < world:
            raise UsageError(f"process {rank} of {world}", hint="processes are counted from 0")
        if self.rows % world:
            raise ConfigError(f"{self.rows} rows do not go into {world} processes", hint="use a multiple of them")
        self.rank, self.world = rank, world
        return self

    @property
    def mine(self) -> slice:
        """Which rows of a batch."""
        each = self.rows // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def _own(self) -> State:
        return {"given": self.given}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.given = int(state["given"])

    def _reset(self, epoch: int) -> None:
        self.given = 0
