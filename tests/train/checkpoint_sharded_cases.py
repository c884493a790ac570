"""A model whose parameters can be shared out unevenly, and steps that are the same on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orchard.train.checkpoint import TrainState
from orchard.train.ema import EMA
from orchard.train.optim import Adafactor, AdamW, AdamW8bit, Muon

SHAPES = {
    "up": (12, 8),
    "odd": (5, 16),
    "experts": (3, 6, 8),
    "norm": (7,),
    "single": (1,),  # the second process has nothing of it
    "embedding": (20, 8),
    "narrow": (6, 4),
}
EVERY: dict[str, tuple[Any, float]] = {
    "adamw": (AdamW.Config(lr=1e-2), 1e-6),
    "muon": (Muon.Config(lr=1e-2), 1e-5),
    "adafactor": (Adafactor.Config(lr=1e-2, momentum=0.9), 1e-5),
    "8bit": (AdamW8bit.Config(lr=1e-2, smallest=64), 0.0),
}
Place = Callable[[Tensor], Tensor]


class Parts(nn.Module):
    def __init__(self, place: Place, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=make)
            self.register_parameter(name, nn.Parameter(place(value.bfloat16() if name == "narrow" else value)))
        self.register_buffer("seen", torch.tensor(seed))


def build(cfg: Any, place: Place = lambda x: x, *, seed: int = 0) -> TrainState:
    model = Parts(place, seed)
    averages = EMA.Config().build(model=model)
    return TrainState(model, cfg.build(named_parameters=model.named_parameters()), averages, {"seed": seed})


def go(state: TrainState, steps: range, place: Place = lambda x: x) -> None:
    for step in steps:
        make = torch.Generator().manual_seed(1000 + step)
        for name, parameter in state.model.named_parameters():
            gradient = torch.randn(SHAPES[name], generator=make)
            parameter.grad = place(gradient.to(parameter.dtype))
        state.optimizer.step()
        assert state.ema is not None
        state.ema.update(state.model)


class Tied(nn.Module):
    """An embedding that is its own head, and a part between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.middle(self.embedding(ids))))
        return found


def tied(seed: int, spread: Callable[[nn.Module], Any] = lambda model: None) -> TrainState:
    model = Tied(seed)
    spread(model)
    return TrainState(model, AdamW.Config(lr=1e-2).build(named_parameters=model.named_parameters()))


def learn(state: TrainState, steps: range) -> None:
    for step in steps:
        ids = torch.arange(11).roll(step)
        state.optimizer.zero_grad()
        state.model(ids).square().mean().backward()
        state.optimizer.step()


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
