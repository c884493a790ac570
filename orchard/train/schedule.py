"""How the learning rate goes: factors of the base rate, as pure functions of the step.

`schedule(step)` for steps from 0 gives a number within 0..1. Nothing is remembered, so a resumed run cannot be off by one. All
kinds warm up in a straight line: step 0 takes 1/warmup of the rate and step warmup - 1 all of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


class Schedule(ABC):
    """The contract: warm-up, then `after`."""

    config: Any

    def __call__(self, step: int) -> float:
        """The factor of the base rate at a step."""
        warmup = self.config.warmup
        return (step + 1) / warmup if step < warmup else self.after(step)

    @abstractmethod
    def after(self, step: int) -> float:
        """The factor at a step that is past warming up."""


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its own base rate times a factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


class Constant(Configurable, Schedule):
    """Stays at the base rate."""

    @config
    class Config(BaseConfig):
        warmup: int = 0

        def wire(self) -> None:
            _check(self.warmup)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def after(self, step: int) -> float:
        return 1.0


class Cosine(Configurable, Schedule):
    """Falls along half a cosine from 1 to `floor` at the last step (arXiv 1608.03983)."""

    @config
    class Config(BaseConfig):
        steps: int = REQUIRED
        warmup: int = 0
        floor: float = 0.0

        def wire(self) -> None:
            _check(self.warmup, self.steps, self.floor)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def after(self, step: int) -> float:
        return _between(self.config.floor, (1 + math.cos(math.pi * _gone(self.config, step))) / 2)


class Linear(Configurable, Schedule):
    """Falls in a straight line from 1 to `floor` at the last step."""

    @config
    class Config(BaseConfig):
        steps: int = REQUIRED
        warmup: int = 0
        floor: float = 0.0

        def wire(self) -> None:
            _check(self.warmup, self.steps, self.floor)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def after(self, step: int) -> float:
        return _between(self.config.floor, 1 - _gone(self.config, step))


class WSD(Configurable, Schedule):
    """Warm up, stay, decay (arXiv 2404.06395): the rate stays for most of the run and falls over its last `decay` steps. A run
    can be prolonged from any point before the fall. `shape`: "linear", or "sqrt" for 1 - √share (arXiv 2405.18392)."""

    @config
    class Config(BaseConfig):
        steps: int = REQUIRED
        warmup: int = 0
        decay: int = REQUIRED
        shape: str = "linear"
        floor: float = 0.0

        def wire(self) -> None:
            _check(self.warmup, self.steps, self.floor)
            if self.decay < 1 or self.warmup + self.decay > self.steps:
                raise ConfigError(
                    f"{self.warmup} steps of warm-up and {self.decay} of decay do not fit into {self.steps}",
                    hint="decay has to be 1 or more, and both together no more than steps",
                )
            if self.shape not in ("linear", "sqrt"):
                raise ConfigError(f"shape is {self.shape!r}", hint="use linear or sqrt")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def after(self, step: int) -> float:
        cfg = self.config
        gone = min(max(step - (cfg.steps - 1 - cfg.decay), 0) / cfg.decay, 1.0)
        return _between(cfg.floor, 1 - (math.sqrt(gone) if cfg.shape == "sqrt" else gone))


class InverseSqrt(Configurable, Schedule):
    """Falls as 1 / √step, without an end (arXiv 1706.03762); 1 where the warm-up ends."""

    @config
    class Config(BaseConfig):
        warmup: int = 1

        def wire(self) -> None:
            _check(self.warmup)
            if self.warmup < 1:
                raise ConfigError("warmup is 0", hint="the fall is measured in warm-ups: use 1 or more")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def after(self, step: int) -> float:
        return math.sqrt(self.config.warmup / (step + 1))


def _gone(cfg: Any, step: int) -> float:
    """The share of the way from the end of the warm-up to the last step."""
    start = max(cfg.warmup - 1, 0)
    way = cfg.steps - 1 - start
    return 1.0 if way <= 0 else min(max((step - start) / way, 0.0), 1.0)


def _between(floor: float, height: float) -> float:
    return floor + (1 - floor) * height


def _check(warmup: int, steps: int | None = None, floor: float = 0.0) -> None:
    if warmup < 0 or (steps is not None and (steps < 1 or warmup > steps)):
        raise ConfigError(
            f"{warmup} steps of warm-up do not fit into {steps}", hint="use 0 ≤ warmup ≤ steps, and at least one step"
        )
    if not 0 <= floor <= 1:
        raise ConfigError(f"floor is {floor}", hint="it is a share of the base rate: use 0 to 1")
