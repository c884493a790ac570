"""Ways to stretch rotary frequencies so that a model reads further than it was trained.

Each is a small config whose object maps frequencies to frequencies. `gain` multiplies the rotated vectors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


class Scaling(ABC):
    gain: float = 1.0

    @abstractmethod
    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """New frequencies [R/2] for old ones."""


class Linear(Configurable, Scaling):
    """Positions divided by a factor (position interpolation, arXiv 2306.15595)."""

    @config
    class Config(BaseConfig):
        factor: float = REQUIRED

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.config.factor


class Ntk(Configurable, Scaling):
    """A larger base instead of closer positions: fast channels keep their resolution."""

    @config
    class Config(BaseConfig):
        factor: float = REQUIRED

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        pairs = len(frequencies)
        exponent = torch.arange(pairs, dtype=torch.float32) / max(pairs - 1, 1)
        return frequencies / self.config.factor**exponent


class Llama3(Configurable, Scaling):
    """Slow channels are stretched, fast ones kept, those between blended (Llama 3.1)."""

    @config
    class Config(BaseConfig):
        factor: float = REQUIRED
        low: float = 1.0
        high: float = 4.0
        original: int = 8192

    def __init__(self, cfg: Config) -> None:
        if cfg.high <= cfg.low:
            raise ConfigError(f"nothing lies between {cfg.low} and {cfg.high} turns", hint="high must be above low")
        self.config = cfg

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        cfg = self.config
        turns = cfg.original * frequencies / (2 * math.pi)
        blend = ((turns - cfg.low) / (cfg.high - cfg.low)).clamp(0, 1)
        return (1 - blend) * frequencies / cfg.factor + blend * frequencies


class Yarn(Configurable, Scaling):
    """Blend by how often a channel turns within the trained length (YaRN, arXiv 2309.00071)."""

    @config
    class Config(BaseConfig):
        factor: float = REQUIRED
        original: int = REQUIRED
        fast: float = 32.0
        slow: float = 1.0
        gain: float | None = None

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.gain = cfg.gain if cfg.gain is not None else 0.1 * math.log(max(cfg.factor, 1.0)) + 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        cfg, pairs = self.config, len(frequencies)

        def pair_turning(times: float) -> float:
            return 2 * pairs * math.log(cfg.original / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_turning(cfg.fast)), 0)
        high = min(math.ceil(pair_turning(cfg.slow)), 2 * pairs - 1)
        ramp = ((torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / cfg.factor * ramp


class Factors(Configurable, Scaling):
    """One divisor per channel pair, as a file gives them."""

    @config
    class Config(BaseConfig):
        factors: tuple[float, ...] = REQUIRED

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        if len(self.config.factors) != len(frequencies):
            count = len(self.config.factors)
            raise ConfigError(
                f"{count} rotary factors for {len(frequencies)} channel pairs", hint="the file is damaged"
            )
        return frequencies / torch.tensor(self.config.factors)
