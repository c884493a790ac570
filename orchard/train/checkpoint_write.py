"""From a snapshot to a folder that is there for good: planned together, written by each, published by the first.

A checkpoint is a folder `step-<step>-<number>`, where the number counts what was written into one place. So a step can be
written again (a run that was set back) without touching what is there, and the latest is the one written last.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint_snapshot import Snapshot, SnapshotPlanner
from orchard.train.checkpoint_storage import Writer
from orchard.train.checkpoint_together import Together
from orchard.train.checkpoint_weights import put_together

PATTERN = re.compile(r"step-(\d{8,})-(\d{6,})")
LEFT_OVER = re.compile(r"\.step-\d{8,}-\d{6,}\.(part|gone)")


def places(folder: Path) -> list[tuple[int, int, Path]]:
    """Number, step and folder of everything that has a checkpoint's name, from the first written to the last."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = PATTERN.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[2]), int(match[1]), path))
    return sorted(found)


def write(folder: Path, step: int, snapshot: Snapshot, together: Together) -> Path:
    """All processes call this, each with its own snapshot. The path of the new checkpoint."""
    planner = SnapshotPlanner(snapshot)
    planner.set_up_planner({}, None, together.first)
    final = together.one(lambda: _next_place(folder, step))
    part = folder / f".{final.name}.part"
    writer = Writer(part, step=step, rank=together.rank, document=snapshot.document)
    known: list[Metadata] = []

    def share(plans: list[SavePlan]) -> list[SavePlan]:
        dealt, metadata = planner.create_global_plan(plans)
        known.append(metadata)
        return writer.prepare_global_plan(dealt)

    try:
        plan = together.deal(lambda: writer.prepare_local_plan(planner.create_local_plan()), share)
        results = together.each(lambda: writer.write_data(planner.finish_plan(plan), planner).wait())

        def publish() -> None:
            writer.finish(known[0], results)
            with disk.disk(final):
                disk.rename(part, final)
                disk.flush_folder(folder)

        together.one(publish)
    except BaseException:
        if together.first:
            with suppress(OSError):
                disk.remove(part)
        raise
    return final


def sweep(folder: Path) -> None:
    """Remove what runs that were killed left half-written or half-deleted."""
    for path in folder.iterdir():
        if LEFT_OVER.fullmatch(path.name):
            disk.remove(path)


def delete(place: Path) -> None:
    """First its name, at one stroke, so that no half of it can be taken for a checkpoint."""
    gone = place.with_name(f".{place.name}.gone")
    disk.rename(place, gone)
    disk.remove(gone)
    for path in put_together(place):
        disk.remove(path)


def _next_place(folder: Path, step: int) -> Path:
    with disk.disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        used = [number for number, _, _ in places(folder)]
        return folder / f"step-{step:08d}-{max(used, default=0) + 1:06d}"
