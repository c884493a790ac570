"""The disk's side: neurons as one record each against a record for each of their rows, read past the page cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchard.cache.experts import Records, Source, room, write_records
from orchard.core.errors import UsageError
from orchard.models.language import Decoder
from orchard.transforms.activity import relu_layers
from orchard.transforms.neurons import write_neurons
from orchard.transforms.neurons_file import FIXED, MAPS

Loads = Sequence[Sequence[np.ndarray]]
"""[token][layer] → numbers of neurons."""
ROUNDS = 3


class Files:
    """The same neurons twice: bundled, and with rows of gate, up and down apart from each other."""

    def __init__(self, model: Decoder, folder: Path) -> None:
        write_neurons(model, folder / "bundled")
        layers = relu_layers(model)
        sources = [
            Source(f"{path}.{name}", layer.config.hidden_dim, _rows(layer, name), page=512)
            for path, layer in layers.items()
            for name in MAPS
        ]
        write_records(folder / "apart", sources)
        self.direct = True
        try:
            self.bundled, self.apart = (Records.open(folder / name, direct=True) for name in ("bundled", "apart"))
        except UsageError:  # a file system in memory, say: what is measured then is the cost of calls alone
            self.direct = False
            self.bundled, self.apart = (Records.open(folder / name) for name in ("bundled", "apart"))
        names = [layer.name for layer in self.bundled.layers]
        self.places = [at for at, name in enumerate(names) if not name.endswith(FIXED)]

    def close(self) -> None:
        self.bundled.close()
        self.apart.close()

    def read_bundled(self, loads: Loads) -> None:
        self._read(self.bundled, [[at] for at in self.places], loads)

    def read_apart(self, loads: Loads) -> None:
        many = len(MAPS)
        self._read(self.apart, [list(range(many * at, many * at + many)) for at in range(len(self.places))], loads)

    def read_all(self, tokens: int) -> None:
        """Every neuron for every token, in pieces as large as a disk likes."""
        for _ in range(tokens):
            for at in self.places:
                layer = self.bundled.layers[at]
                self.bundled.read(at, 0, room(layer.stride * layer.units), layer.units)

    @staticmethod
    def _read(records: Records, places: list[list[int]], loads: Loads) -> None:
        out = room(records.record_bytes)
        for token in loads:
            for units, parts in zip(token, places, strict=True):
                for unit in units:
                    for part in parts:
                        records.read(part, int(unit), out)


def _rows(layer: Any, name: str) -> Any:
    weight = getattr(layer, name).weight.detach()
    rows = weight.mT if name == "down" else weight
    return lambda unit: {"row": rows[unit].contiguous()}


def bundling(files: Files, loads: Loads) -> dict[str, Any]:
    """Reads for each neuron and speed in MB/s of both files, by turns."""
    count = sum(len(units) for token in loads for units in token)
    speeds: dict[str, list[float]] = {"bundled": [], "apart": []}
    reads: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name in speeds:
            records: Records = getattr(files, name)
            records.reads = records.bytes = 0
            start = time.perf_counter()
            getattr(files, f"read_{name}")(loads)
            speeds[name].append(records.bytes / 1e6 / (time.perf_counter() - start))
            reads[name] = records.reads / count
    ratios = sorted(one / other for one, other in zip(speeds["bundled"], speeds["apart"], strict=True))
    return {
        "reads": reads,
        "speeds": {name: statistics.median(found) for name, found in speeds.items()},
        "ratio": statistics.median(ratios),
        "range": (ratios[0], ratios[-1]),
    }


def milliseconds(files: Files, alone: Loads, windowed: Loads) -> dict[str, float]:
    """Time of reads for a token, in the paper's order: everything; predicted; in a window; in a window and bundled."""
    ways: dict[str, Any] = {
        "naive": lambda: files.read_all(len(alone)),
        "predicted": lambda: files.read_apart(alone),
        "windowed": lambda: files.read_apart(windowed),
        "bundled": lambda: files.read_bundled(windowed),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(1e3 * (time.perf_counter() - start) / len(alone))
    return {name: statistics.median(found) for name, found in taken.items()}
