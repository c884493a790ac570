"""Checkpoints of a run: whole or not there, written while training goes on, loaded on any number of processes.

    checkpoints = Checkpoints(Path("run"), keep=2, keep_every=1000)
    checkpoints.save(step, TrainState(model, optimizer, ema, {"source": source.state()}))   # back as soon as all is copied
    …
    state = TrainState(model, optimizer, ema)
    step = checkpoints.load(state)                                                           # state.extra is the stored one

On several processes all of them make these calls, at the same steps. What a folder holds is in docs/checkpoints.md.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from orchard.core.errors import BadFile, UsageError
from orchard.train.checkpoint_disk import CheckpointFailed
from orchard.train.checkpoint_fit import Fit, check_config
from orchard.train.checkpoint_manifest import Manifest, whole
from orchard.train.checkpoint_snapshot import Buffers, Snapshot
from orchard.train.checkpoint_storage import Reader
from orchard.train.checkpoint_together import Together
from orchard.train.checkpoint_weights import weights_file
from orchard.train.checkpoint_write import delete, places, write
from orchard.train.state import TrainState

__all__ = ["CheckpointFailed", "Checkpoints", "TrainState"]


class Checkpoints:
    """The newest `keep` stay, and for good every step that `keep_every` divides."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int | None = None) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise UsageError(f"keep is {keep} and keep_every is {keep_every}", hint="use at least 1, or None")
        self.folder = Path(folder)
        self.keep, self.keep_every = keep, keep_every
        self._buffers = Buffers()
        self._group: Together | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._existed = self.folder.is_dir()

    # Writing ------------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
        """Copy the state, and write it in a thread. The one before is waited for; what went wrong with it is raised here, and
        nothing is saved then: call again to go on."""
        self.wait()
        if step < 0:
            raise UsageError(f"step is {step}", hint="count steps from 0")
        together = self._together()
        snapshot: Snapshot | BaseException
        try:
            self._still_there()
            snapshot = Snapshot(state, self._buffers, rank=together.rank)
        except BaseException as error:
            if together.size == 1:
                raise
            snapshot = error  # the others wait for this process: the thread tells them
        # Not a daemon: a program that ends lets it finish.
        self._thread = threading.Thread(target=self._write, args=(step, snapshot, together), name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, snapshot: Snapshot | BaseException, together: Together) -> None:
        try:
            newest = write(self.folder, step, together.alike(lambda: _sound(snapshot)), together)
            if together.first:
                self._existed = True
                self._rotate(newest)
        except BaseException as error:
            self._error = error

    def _rotate(self, newest: Path) -> None:
        """Only after `newest` is whole. What is broken counts for nothing, and is left for people to look at."""
        sound = [(step, path) for _, step, path in places(self.folder) if path == newest or whole(path) is not None]
        last: dict[int, Path] = {}
        for step, path in sound:  # of a step that was written twice the second counts, and its time
            last.pop(step, None)
            last[step] = path
        kept = set(list(last.values())[-self.keep :])
        if self.keep_every is not None:
            kept |= {path for step, path in last.items() if step % self.keep_every == 0}
        for _, path in sound:
            if path not in kept:
                try:
                    delete(path)
                except OSError as error:  # the new one is whole: no reason to stop a run
                    warnings.warn(f"{path} could not be deleted: {error.strerror}", stacklevel=2)

    def _still_there(self) -> None:
        """A folder that vanished under a run may be a disk that is gone: it is not silently made anew."""
        if self._existed and not self.folder.is_dir():
            raise CheckpointFailed(
                f"{self.folder} has vanished, and with it what was saved there",
                hint="see whether its disk is still there; make the folder again to go on saving",
            )

    # Reading ------------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that can be loaded."""
        return sorted({step for _, step, path in places(self.folder) if whole(path) is not None})

    def latest(self) -> int | None:
        """The step that was written last, of those that are whole."""
        for _, step, path in reversed(places(self.folder)):
            if whole(path) is not None:
                return step
        return None

    def load(self, state: TrainState, step: int | None = None, *, other_config: bool = False) -> int:
        """Fill the state, in place; the step it is from. All of it is checked first: an error leaves the state as it was."""
        self.wait()
        together = self._together()
        place = together.one(lambda: self.place(step))
        manifest = together.alike(lambda: Manifest.read(place))
        if not other_config:
            together.alike(lambda: check_config(state, manifest))
        fit = together.alike(lambda: Fit(state, manifest, together))
        fit.check()
        together.alike(lambda: manifest.verify(place, part=together.rank, parts=together.size))
        together.alike(lambda: _fill(fit.targets, Reader(place, manifest), manifest.metadata()))
        fit.finish()
        self._existed = True
        return manifest.step

    def weights(self, step: int | None = None, *, average: bool = False) -> Path:
        """The model's weights (or their averages) as one safetensors file, with the model's own names. One process's checkpoint
        has that file already; otherwise it is put together beside the checkpoint and deleted with it."""
        self.wait()
        place = self.place(step)
        return weights_file(place, Manifest.read(place), average=average)

    def place(self, step: int | None = None) -> Path:
        """The folder of a step, or of the latest."""
        found = [(one, path) for _, one, path in places(self.folder) if step is None or one == step]
        for _, path in reversed(found):
            if whole(path) is not None:
                return path
        if found:  # say what is wrong with the newest
            broken = found[-1][1]
            manifest = Manifest.read(broken)
            manifest.sizes(broken)
            raise BadFile(f"{broken} cannot be read", hint="load another step")
        there = ", ".join(map(str, self.steps())) or "none"
        what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise UsageError(f"{self.folder} does not hold {what}", hint=f"steps that can be loaded: {there}")

    def _together(self) -> Together:
        if self._group is None:
            self._group = Together()
        return self._group


def _sound(snapshot: Snapshot | BaseException) -> Snapshot:
    if isinstance(snapshot, BaseException):
        raise snapshot
    return snapshot


@torch.no_grad()
def _fill(targets: dict[str, Tensor], reader: Reader, metadata: Metadata) -> None:
    """torch plans which stored parts fill which of this process's tensors."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted: dict[str, Any] = dict(targets)
    planner.set_up_planner(wanted, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
