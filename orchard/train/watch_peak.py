"""The most a device can multiply and add in a second: from its maker's data sheet, or measured.

A known GPU has a number that others compare with. Everything else (CPUs first of all) is measured with a short product of two
matrices in the run's own type, which is what its libraries reach and not what its silicon could; it is marked as measured.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache

import torch

PEAKS: dict[str, tuple[float, float, float]] = {
    r"B200\b": (2250e12, 1125e12, 75e12),
    r"GH200\b|H200\b(?! NVL)|H100\b(?! (PCIe|NVL))": (989e12, 494e12, 67e12),
    r"H[12]00 NVL": (835e12, 417e12, 60e12),
    r"H100 PCIe": (756e12, 378e12, 51e12),
    r"A100\b": (312e12, 156e12, 19.5e12),
    r"A40\b": (149.7e12, 74.8e12, 37.4e12),
    r"A10\b": (125e12, 62.5e12, 31.2e12),
    r"RTX A6000\b": (154.8e12, 77.4e12, 38.7e12),
    r"L40S\b": (362e12, 183e12, 91.6e12),
    r"L40\b": (181e12, 90.5e12, 90.5e12),
    r"L4\b": (121e12, 60e12, 30.3e12),
    r"RTX 4090$": (165.2e12, 82.6e12, 82.6e12),
    r"RTX 3090$": (71e12, 35.6e12, 35.6e12),
}
"""Operations a second in bfloat16, in float32 through TF32, and in float32: dense, added up in float32, by name of the device."""
SECONDS = 0.15
"""That measuring may take, about."""
_KINDS = ("bfloat16", "TF32", "float32")


@dataclass(frozen=True)
class Peak:
    flops: float
    measured: bool
    words: str
    """Where the number comes from."""


def peak_of(device: torch.device | str, dtype: str, *, measure: bool = True) -> Peak | None:
    """None where it is not known and nothing may be measured."""
    device = torch.device(device)
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), dtype, tf32=_uses_tf32())
        if known is not None:
            return known
    if not measure or device.type == "meta":
        return None
    return _measured(str(device), dtype, torch.get_num_threads())


def known_peak(name: str, dtype: str, *, tf32: bool) -> Peak | None:
    """From the data sheet of a device of that name."""
    for pattern, flops in PEAKS.items():
        if re.search(rf"\b(?:{pattern})", name):
            kind = 0 if dtype == "bfloat16" else 1 if tf32 else 2
            return Peak(flops[kind], False, f"{_tera(flops[kind])} by the data sheet ({name}, {_KINDS[kind]})")
    return None


@cache
def _measured(device: str, dtype: str, threads: int) -> Peak | None:
    """The best of a few products, each about twice as long as the one before until the time is up. Draws no random numbers."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    try:
        size, best, begun = 128, 0.0, time.perf_counter()
        with torch.inference_mode():
            while True:
                one = torch.ones(size, size, dtype=kind, device=device)
                first = _seconds(one)  # the first of a size sets things up
                took = min(first, _seconds(one))
                best = max(best, 2 * size**3 / took)
                left = SECONDS - (time.perf_counter() - begun)
                if left < 2 * took:
                    return Peak(
                        best, True, f"{_tera(best)}, measured with a product of {size} x {size} matrices in {dtype}"
                    )
                size = size * 2 if left > 20 * took and size < 8192 else size
    except (RuntimeError, NotImplementedError):  # a device without this type
        return None


def _seconds(one: torch.Tensor) -> float:
    begun = time.perf_counter()
    one @ one
    if one.device.type != "cpu":
        torch.get_device_module(one.device).synchronize()
    return max(time.perf_counter() - begun, 1e-9)


def _uses_tf32() -> bool:
    """There are two ways to ask for TF32; asking for the older one fails where the newer one was used."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision in ("tf32", "ieee"):
        return bool(precision == "tf32")
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return False


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.4g} GFLOP/s"
