"""One progress helper for every long job: a bar on a terminal's stderr, silence anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """What a job calls as it goes: `advance(amount)`; `note` replaces the text beside the bar, `left` (seconds) the bar's own
    guess of the time that is left."""

    def __call__(self, amount: float = 1, *, note: str | None = None, left: float | None = None) -> None: ...


@contextmanager
def progress(title: str, *, total: float | None = None, unit: str = "items") -> Iterator[Advance]:
    """`with progress("reading", total=n) as advance: … advance()`. `unit="bytes"` shows sizes and speed."""
    if not sys.stderr.isatty():
        yield silent
        return
    with _bar(unit) as bar:
        task = bar.add_task(title, total=total, note="", left=None)

        def advance(amount: float = 1, *, note: str | None = None, left: float | None = None) -> None:
            bar.update(task, advance=amount, note=note or "", left=left)

        yield advance


def track(items: Iterable[T], title: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with progress(title, total=total) as advance:
        for item in items:
            yield item
            advance()


def lasting(seconds: float) -> str:
    """A time as people say it: 4.2 s, 12 min 5 s, 3 h 20 min, 2 days 4 h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.2g} s"
    whole = round(seconds)
    for size, name, smaller, below in ((86400, "days", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size * (2 if name == "days" else 1):
            count, rest = divmod(whole, size)
            return f"{count:,} {name}" + (f" {rest // smaller} {below}" if rest // smaller else "")
    return f"{whole} s"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as a bar has room for: 0:12:05."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _bar(unit: str) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Left(TimeRemainingColumn):
        """What the job says, and the bar's own guess where it says nothing."""

        def render(self, task: Task) -> Text:
            left = task.fields.get("left")
            return super().render(task) if left is None else Text(clock(left), style="progress.remaining")

    console = Console(stderr=True)
    amounts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    )
    # Names of files are text and no markup. A note may be cut off, what stands before it may not.
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=40 if console.width >= 130 else 20 if console.width >= 100 else 8),
        *amounts,
        Left(),
        TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
    ]
    return Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty(), expand=True)


def silent(amount: float = 1, *, note: str | None = None, left: float | None = None) -> None:
    return None
