"""One progress helper for every long job: a bar on a terminal's stderr, silence anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """What a job calls as it goes: `advance(amount)`; `note` replaces the text beside the bar."""

    def __call__(self, amount: float = 1, *, note: str | None = None) -> None: ...


@contextmanager
def progress(title: str, *, total: float | None = None, unit: str = "items") -> Iterator[Advance]:
    """`with progress("reading", total=n) as advance: … advance()`. `unit="bytes"` shows sizes and speed."""
    if not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: float = 1, *, note: str | None = None) -> None:
            bar.update(task, advance=amount, description=(note and f"{title}: {note}") or title)

        yield advance


def track(items: Iterable[T], title: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with progress(title, total=total) as advance:
        for item in items:
            yield item
            advance()


def _silent(amount: float = 1, *, note: str | None = None) -> None:
    return None
