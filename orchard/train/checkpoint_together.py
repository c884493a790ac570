"""Processes that save and load as one: what one of them cannot do, none of them does, and all of them say the same.

Checkpoints are written by a thread while the main thread trains, so their messages go through a group of their own (gloo, on the
CPU): two threads may not take turns on one group. A single process needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from orchard.core.errors import OrchardError
from orchard.train.checkpoint_disk import GOES_ON, CheckpointFailed

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others: as long as the slowest needs to write its files."""


class Together:
    """All processes of the run. To be made by all of them at the same point; so is every call."""

    def __init__(self) -> None:
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if many else None
        self.rank = dist.get_rank() if many else 0
        self.size = dist.get_world_size() if many else 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Everybody does it; everybody gets everybody's result, or the same error."""
        mine = _attempt(work)
        return [_value(one) for one in self._gather(mine)]

    def alike(self, work: Callable[[], T]) -> T:
        """Everybody does it and keeps its own result; if one of them fails, all of them do."""
        mine = _attempt(work)
        for one in self._gather(mine if isinstance(mine, OrchardError) else None):
            _value(one)
        value: T = _value(mine)
        return value

    def one(self, work: Callable[[], T]) -> T:
        """The first does it; everybody gets the result, or the same error."""
        result = [_attempt(work) if self.first else None]
        if self.group is not None:
            self._speak(lambda: dist.broadcast_object_list(result, src=0, group=self.group))
        value: T = _value(result[0])
        return value

    def deal(self, work: Callable[[], T], share: Callable[[list[T]], list[R]]) -> R:
        """Everybody does `work`; the first makes of all results what each is to get."""
        everything = self._gather(_attempt(work))
        if self.group is None:
            return share([_value(one) for one in everything])[0]
        dealt: list[Any] | None = None
        if self.first:
            made = _attempt(lambda: share([_value(one) for one in everything]))
            dealt = [made] * self.size if isinstance(made, OrchardError) else made
        mine: list[Any] = [None]
        self._speak(lambda: dist.scatter_object_list(mine, dealt, src=0, group=self.group))
        value: R = _value(mine[0])
        return value

    def _gather(self, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        everything: list[Any] = [None] * self.size
        self._speak(lambda: dist.all_gather_object(everything, mine, group=self.group))
        return everything

    def _speak(self, message: Callable[[], Any]) -> None:
        try:
            message()
        except (RuntimeError, ValueError) as error:
            raise CheckpointFailed(f"another process does not answer: {error}", hint=GOES_ON) from error


def _attempt(work: Callable[[], T]) -> T | OrchardError:
    try:
        return work()
    except OrchardError as error:
        return error
    except Exception as error:  # it has to reach the others, or they would wait for this process
        failed = CheckpointFailed(f"{type(error).__name__}: {error}", hint=GOES_ON)
        failed.__cause__ = error
        return failed


def _value(outcome: Any) -> Any:
    if isinstance(outcome, OrchardError):
        raise outcome
    return outcome
