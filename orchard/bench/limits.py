"""What this machine allows: bytes read and operations done per second, and which of the two bounds a figure.

Read bandwidth is measured by the native library (`native/limits.cpp`), over a set far larger than any cache and over one of
the size of a small model, part of which stays in cache. Arithmetic is what torch's own matrix product reaches, which uses
matrix units where there are any. An engine that is at the limit reads every weight once per step and nothing else.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchard.core.errors import UsageError

DRAM_SET, CACHE_SET = 1 << 30, 96_000_000
SHAPES = ((2048, 2048, 2048), (512, 1536, 576))


@dataclass(frozen=True)
class Limits:
    """Per second. `dram`, `cached`: bytes; `bf16`, `int8`: operations (a product and a sum are two). None: not known."""

    dram: float | None = None
    cached: float | None = None
    bf16: float | None = None
    int8: float | None = None

    def bandwidth(self, bytes_read: float) -> float | None:
        """For a set of this size: a small one stays in cache in part, and is read faster."""
        return self.cached if bytes_read <= 2 * CACHE_SET else self.dram


@dataclass(frozen=True)
class Share:
    """How near a figure is to its limit: 1.0 is the limit itself."""

    by: str
    share: float


def share(limits: Limits, *, seconds: float, bytes_read: float, operations: float) -> Share | None:
    """Which limit bounds work that took `seconds`, and how near it came. None where the limits are not known."""
    if not seconds > 0:
        raise UsageError(f"work cannot take {seconds} seconds", hint="give the time that was measured")
    bandwidth = limits.bandwidth(bytes_read)
    reading = bytes_read / bandwidth if bandwidth else None
    counting = operations / limits.bf16 if limits.bf16 else None
    if reading is None or counting is None:
        return None
    by, least = ("bandwidth", reading) if reading >= counting else ("arithmetic", counting)
    return Share(by, least / seconds)


def read_bandwidth(size: int, threads: int, repeats: int) -> float | None:
    """Bytes per second; None without the native library."""
    from orchard.ops.kernels.native import library

    function = getattr(library(), "orchard_read_bandwidth", None)
    if function is None:
        return None
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
    rate = float(function(size, threads, repeats))
    if rate < 0:
        raise UsageError(f"no memory to read {size:,} bytes with {threads} threads", hint="free some memory first")
    return rate


def arithmetic(threads: int, seconds: float = 0.25) -> dict[str, float | None]:
    """Operations per second of torch's matrix products: the best of two shapes, each tried for about `seconds`."""
    import torch

    torch.set_num_threads(threads)

    def rate(
        make: Callable[[int, int], torch.Tensor], product: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> float:
        best = 0.0
        for rows, inner, cols in SHAPES:
            left, right = make(rows, inner), make(cols, inner).t()
            product(left, right)
            end = time.perf_counter() + seconds
            while (started := time.perf_counter()) < end:
                product(left, right)
                best = max(best, 2 * rows * inner * cols / (time.perf_counter() - started))
        return best

    bf16 = rate(lambda *shape: torch.randn(shape).bfloat16(), torch.mm)
    try:
        int8 = rate(lambda *shape: torch.randint(-100, 100, shape, dtype=torch.int8), torch._int_mm)
    except RuntimeError:  # not on this processor
        int8 = None
    return {"bf16": bf16, "int8": int8}


def measure(threads: int, repeats: int = 6) -> dict[str, float | None]:
    """All limits, as the fields of `Limits`."""
    return {
        "dram": read_bandwidth(DRAM_SET, threads, repeats),
        "cached": read_bandwidth(CACHE_SET, threads, 4 * repeats),
        **arithmetic(threads),
    }
