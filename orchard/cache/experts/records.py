"""Weights that live in a file, one contiguous record per unit: an expert, or a bundle of neurons.

A record holds several named arrays (gate, up and down of an expert, in whatever a format packs them into), so one read
brings everything a unit needs: "row-column bundling" of LLM in a flash (arXiv 2312.11514). Reads are counted here, because
the system's page cache hides what a disk would have had to do.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.cache.experts.errors import OtherModel, RecordsUnreadable
from orchard.cache.experts.layout import PAGE, PAGES, Facts, Layer, arrays_of, decode, encode, front
from orchard.core.errors import BadFile, UsageError
from orchard.core.files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

    Unit = Callable[[int], Mapping[str, Tensor | np.ndarray]]


@dataclass(frozen=True)
class Source:
    """One layer to be written: `unit(i)` gives the arrays of record i, all of them alike."""

    name: str
    units: int
    unit: Unit
    page: int = PAGE
    """Records begin at multiples of so many bytes."""


def write_records(path: Path | str, layers: Sequence[Source], facts: Facts | None = None) -> None:
    """Write all layers, record by record; the file appears whole or not at all. `facts` say whose weights these are."""
    if not layers or any(layer.units < 1 for layer in layers):
        raise UsageError("there is nothing to write", hint="give at least one layer with at least one unit")
    if any(layer.page not in PAGES for layer in layers):
        raise UsageError("records cannot begin there", hint="pages have " + ", ".join(map(str, PAGES)) + " bytes")
    plans = [Layer(each.name, each.units, arrays_of(_tensors(each.unit(0))), page=each.page) for each in layers]
    start, placed = encode(facts or {}, plans)
    with atomic_write(Path(path)) as file:
        file.write(start)
        for source, layer in zip(layers, placed, strict=True):
            record = room(layer.stride)
            views = layer.views(record)
            for number in range(source.units):
                _fill(views, _tensors(source.unit(number)), f"{source.name} {number}")
                file.write(record.numpy().data)
            file.write(bytes(-file.tell() % PAGE))


def _tensors(arrays: Mapping[str, Tensor | np.ndarray]) -> dict[str, Tensor]:
    import torch

    return {name: torch.as_tensor(array).detach() for name, array in arrays.items()}


def _fill(views: Mapping[str, Tensor], arrays: Mapping[str, Tensor], name: str) -> None:
    alike = views.keys() == arrays.keys() and all(
        arrays[key].shape == view.shape and arrays[key].dtype == view.dtype for key, view in views.items()
    )
    if not alike:
        raise UsageError(f"record {name} has other arrays than the first of its layer", hint="make all units alike")
    for key, view in views.items():
        view.copy_(arrays[key])


class Records:
    """An open file of records. Safe to read from many threads."""

    def __init__(self, path: Path, descriptor: int, facts: dict[str, Any], layers: list[Layer], direct: bool) -> None:
        self.path = path
        self.facts = facts
        self.layers = layers
        self.direct = direct
        self.reads = 0
        self.bytes = 0
        self._descriptor = descriptor
        self._lost = False
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | str, *, direct: bool = False, expect: Facts | None = None) -> Records:
        """Check the whole header and the file's size. `direct` reads past the page cache, straight from the disk.

        `expect`: facts that have to be the same, such as the model's name; a file of another model is refused.
        """
        path = Path(path)
        descriptor, facts, layers = _open(path, direct)
        records = cls(path, descriptor, facts, layers, direct)
        try:
            records.require(expect or {})
        except BaseException:
            records.close()
            raise
        return records

    def require(self, expect: Facts) -> None:
        for name, value in expect.items():
            if self.facts.get(name) != value:
                raise OtherModel(
                    f"{self.path.name} belongs to {name} {self.facts.get(name)!r}, not {value!r}",
                    hint="write the records of this model",
                )

    def read(self, layer: int, unit: int, out: Tensor | np.ndarray | memoryview, count: int = 1) -> None:
        """One record, or `count` neighbours at once, into `out`, which has at least `layers[layer].stride` bytes for each (and,
        when reading directly, begins at a multiple of the layer's page, as memory from `room` does)."""
        plan = self.layers[layer]
        if count < 1 or not 0 <= unit <= plan.units - count:
            raise UsageError(f"{plan.name} has units 0 to {plan.units - 1}, not {unit}", hint="ask for one of them")
        array = out if isinstance(out, np.ndarray | memoryview) else out.numpy()
        view = (array.data if isinstance(array, np.ndarray) else array).cast("B")
        size = count * plan.stride
        if len(view) < size:
            raise UsageError(f"a record of {plan.name} takes {plan.stride:,} bytes", hint="make room with `room()`")
        self._fill(view[:size], plan.offset + unit * plan.stride, f"{plan.name} {unit}")
        with self._lock:
            self.reads += 1
            self.bytes += size

    def arrays(self, layer: int, record: Tensor) -> dict[str, Tensor]:
        """The named arrays inside a record that was read, without a copy."""
        return self.layers[layer].views(record)

    def get(self, layer: int, unit: int) -> dict[str, Tensor]:
        """Read one record into memory of its own."""
        record = room(self.layers[layer].stride)
        self.read(layer, unit, record)
        return self.arrays(layer, record)

    @property
    def record_bytes(self) -> int:
        """Of the largest record: what a slot for any of them takes."""
        return max(layer.stride for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.units * layer.stride for layer in self.layers)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def _fill(self, view: memoryview, offset: int, name: str) -> None:
        done = 0
        try:
            descriptor = self._connected()
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count <= 0:
                    break
                done += count
        except OSError as error:
            self._lost = error.errno != errno.EINVAL
            if error.errno == errno.EINVAL:
                raise UsageError(
                    f"{self.path.name} cannot be read directly into this memory", hint="read into memory from `room()`"
                ) from error
            raise RecordsUnreadable(
                f"record {name} of {self.path.name} could not be read: {error.strerror}",
                hint="look after the disk; the file is opened again at the next read",
            ) from error
        if done < len(view):
            self._lost = True
            raise RecordsUnreadable(
                f"record {name} is missing: {self.path.name} was cut while it was in use", hint="restore the file"
            )

    def _connected(self) -> int:
        """The descriptor; after a failure the file is opened and checked anew, for a disk that came back."""
        if self._descriptor < 0:
            raise UsageError(f"{self.path.name} was closed", hint="open it again")
        if self._lost:
            with self._lock:
                if self._lost:
                    try:
                        descriptor, facts, layers = _open(self.path, self.direct)
                    except BadFile as error:
                        raise RecordsUnreadable(error.message, hint="restore the file") from error
                    if (facts, layers) != (self.facts, self.layers):
                        os.close(descriptor)
                        raise RecordsUnreadable(f"{self.path.name} is another file now", hint="restore the file")
                    os.dup2(
                        descriptor, self._descriptor, inheritable=False
                    )  # reads under way in other threads stay valid
                    os.close(descriptor)
                    self._lost = False
        return self._descriptor


def pages(size: int, count: int = 1) -> np.ndarray:
    """Fresh memory [count, size] that begins at a multiple of 4 KiB and is taken from the system only where it is touched."""
    memory = np.frombuffer(mmap.mmap(-1, max(size * count, PAGE)), np.uint8)
    return memory[: size * count].reshape(count, size)


def room(size: int, count: int | None = None) -> Tensor:
    """Fresh memory for a record of so many bytes, or for `count` of them; taken from the system only where it is touched."""
    import torch

    whole = torch.from_numpy(pages(size * (1 if count is None else count))[0])
    return whole if count is None else whole.view(count, size)


def _open(path: Path, direct: bool) -> tuple[int, dict[str, Any], list[Layer]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise BadFile(f"{path.name} cannot be opened: {error.strerror}", hint="give a file of records") from error
    try:
        start = os.pread(descriptor, 16, 0)
        text = os.pread(descriptor, front(start, path.name), 16)
        facts, layers = decode(start, text, os.fstat(descriptor).st_size, path.name)
        if direct:
            descriptor = _directly(path, descriptor)
    except OSError as error:
        os.close(descriptor)
        raise BadFile(f"{path.name} cannot be read: {error.strerror}", hint="look after the disk") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, facts, layers


def _directly(path: Path, descriptor: int) -> int:
    flag = getattr(os, "O_DIRECT", None)
    try:
        if flag is None:
            raise OSError(errno.EINVAL, "no direct reads on this system")
        opened = os.open(path, os.O_RDONLY | flag | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read directly: {error.strerror}", hint="use direct=False") from error
    os.close(descriptor)
    return opened
