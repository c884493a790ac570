"""An exponential moving average of weights, which is often better to evaluate and to keep than the weights themselves.

Averages are kept in float32, whatever the parameters are: at a decay of 0.999 a step changes less than bfloat16 can hold.
`with ema.applied(model):` puts them into the model and afterwards puts back, bit for bit, what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


class EMA(Configurable):
    """average ← decay · average + (1 - decay) · weight, for the parameters that are trained. Begins as a copy of them."""

    @config
    class Config(BaseConfig):
        decay: float = 0.999
        ramp: bool = True
        """Begin with a lower decay, (1 + updates) / (10 + updates), until that exceeds `decay`: the first weights are soon
        forgotten (as in TensorFlow's ExponentialMovingAverage)."""

        def wire(self) -> None:
            if not 0 <= self.decay < 1:
                raise ConfigError(f"decay is {self.decay}", hint="use 0 up to, and not including, 1")

    def __init__(self, cfg: Config, *, model: nn.Module) -> None:
        self.config = cfg
        self.updates = 0
        self.averages: dict[str, Tensor] = {
            name: parameter.detach().to(_wide(parameter.dtype), copy=True) for name, parameter in _trained(model)
        }

    def rate(self) -> float:
        """The decay of the next update."""
        if not self.config.ramp:
            return float(self.config.decay)
        return float(min(self.config.decay, (1 + self.updates) / (10 + self.updates)))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move every average towards the model's weights, once for each step of the optimiser."""
        share = 1 - self.rate()
        for name, parameter in self._pairs(model):
            average = self.averages[name]
            average.lerp_(parameter.detach().to(average.dtype), share)
        self.updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights, for evaluating or saving; its own come back in any case."""
        pairs = list(self._pairs(model))
        own = [parameter.detach().clone() for _, parameter in pairs]
        try:
            with torch.no_grad():
                for name, parameter in pairs:
                    parameter.copy_(self.averages[name])
            yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(pairs, own):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """{"updates": number, "averages": {name: tensor}}"""
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stored = state["averages"]
        if stored.keys() != self.averages.keys():
            name = sorted(stored.keys() ^ self.averages.keys())[0]
            raise ConfigError(
                f"the stored averages belong to another model: {name} is only in one of them",
                hint="resume with the config the run was started with",
            )
        self.updates = int(state["updates"])
        self.averages = {name: stored[name].to(own.device, copy=True) for name, own in self.averages.items()}

    def _pairs(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(model.named_parameters())
        missing = self.averages.keys() - parameters.keys()
        if missing:
            raise ConfigError(
                f"the model has no parameter {sorted(missing)[0]!r}", hint="average the model it was built for"
            )
        return ((name, parameters[name]) for name in self.averages)


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
