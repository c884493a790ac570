"""How the time of letting neurons in and out grows: with those that change, or with those that stay.

Time is that of the processor, so that other programs of the machine do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from orchard.cache.neurons import NeuronBuffer
from orchard.core.seeds import fold

WIDTH = 384
CHANGED = (16, 64, 256, 1024)
RESIDENT = (2048, 4096, 8192, 16384)
ROUNDS, REBUILT = 11, 3


def timed(seed: int) -> list[tuple[int, int, float, float]]:
    """(changed, resident, seconds of the buffer, seconds of putting what stays into new memory), medians."""
    chance, found = np.random.default_rng(fold(seed, "buffer") % 2**32), []
    for resident in RESIDENT:
        buffer = NeuronBuffer(2 * resident, WIDTH, capacity=resident)
        first = np.arange(resident)
        buffer.append(first, torch.ones(resident, WIDTH))
        for changed in CHANGED:
            fresh = torch.ones(changed, WIDTH)
            own, other = [], []
            for number in range(ROUNDS):
                held = buffer.resident()
                gone = chance.choice(held, changed, replace=False)
                come = chance.choice(np.flatnonzero(buffer.slots < 0), changed, replace=False)
                own.append(_time(lambda: _swap(buffer, gone, come, fresh)))  # noqa: B023 - called at once
                if number >= REBUILT:
                    continue
                keep = torch.from_numpy(np.flatnonzero(~np.isin(buffer.resident(), gone))[: resident - changed])
                other.append(_time(lambda: torch.cat([buffer.rows[keep], fresh])))  # noqa: B023
            found.append((changed, resident, statistics.median(own), statistics.median(other)))
    return found


def _swap(buffer: NeuronBuffer, gone: np.ndarray, come: np.ndarray, rows: torch.Tensor) -> None:
    buffer.drop(gone)
    buffer.append(come, rows)


def _time(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def slopes(found: list[tuple[int, int, float, float]], which: int) -> tuple[float, float]:
    """Of log time over log changed and log resident, by least squares: 1 is in proportion, 0 is not at all."""
    rows = np.array([[np.log(row[0]), np.log(row[1]), 1.0] for row in found])
    times = np.log(np.array([row[which] for row in found]))
    changed, resident, _ = np.linalg.lstsq(rows, times, rcond=None)[0]
    return float(changed), float(resident)


def each(found: list[tuple[int, int, float, float]]) -> tuple[float, float, float]:
    """Seconds for one neuron more that changes, for one more that stays, and for a call as such, by least squares."""
    rows = np.array([[row[0], row[1], 1.0] for row in found])
    changed, resident, call = np.linalg.lstsq(rows, np.array([row[2] for row in found]), rcond=None)[0]
    return float(changed), float(resident), float(call)
