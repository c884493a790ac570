"""How a run is going: losses, tokens a second, the share of the machine's arithmetic, the time that is left."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import torch
from torch import nn

from orchard.train.step import Taken

WINDOW = 20
"""Steps that speeds are taken over."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}
"""Multiplications and additions a second in bfloat16, without sparsity, by name of the device (makers' data sheets)."""


class Watch:
    """Told of every step; knows the curves and what to show."""

    def __init__(self, model: nn.Module, *, device: torch.device, curves: dict[str, list[Any]] | None = None) -> None:
        self.curves: dict[str, list[Any]] = curves or {}
        self.flops_per_token = 6 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
        self.peak = peak_flops(device)
        self._marks: deque[tuple[float, float]] = deque([(time.perf_counter(), 0.0)], maxlen=WINDOW)
        self._tokens = 0.0

    def note(self, number: int, taken: Taken, tokens: int, means: dict[str, float]) -> dict[str, float]:
        """Add a step to the curves; answers what it adds."""
        self._tokens += tokens
        self._marks.append((time.perf_counter(), self._tokens))
        point = {"loss": taken.loss, **means, "norm": taken.norm.value, "rate": taken.rate, "tokens/s": self.speed}
        if self.peak:
            point["mfu"] = self.mfu
        for name, value in {"step": number, **point}.items():
            self.curves.setdefault(name, []).append(value if math.isfinite(value) else None)
        return point

    @property
    def speed(self) -> float:
        """Tokens a second over the last steps."""
        (begun, before), (now, after) = self._marks[0], self._marks[-1]
        return (after - before) / (now - begun) if now > begun else 0.0

    @property
    def mfu(self) -> float:
        """The share of the device's arithmetic that six operations for each parameter and token are (arXiv 2204.02311)."""
        return self.speed * self.flops_per_token / self.peak if self.peak else math.nan

    def words(self, number: int, point: dict[str, float]) -> str:
        """One line for a person."""
        mfu = f", {100 * self.mfu:.0f} % MFU" if self.peak else ""
        return f"loss {point['loss']:.4f}, {self.speed:,.0f} tokens/s{mfu}"


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAKS.items() if part in name), None)
