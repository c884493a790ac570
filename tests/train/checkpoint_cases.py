"""States to save and load, and how two of them are compared: bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchard.train.checkpoint import TrainState
from orchard.train.checkpoint_snapshot import flatten
from orchard.train.ema import EMA
from tests.train.optim_cases import EVERY, Small, build, train


class Tiny(nn.Module):
    """Two tensors, so that there are few places to break off at."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), float(value)))
        self.register_buffer("count", torch.tensor(int(value)))


def tiny(value: float) -> TrainState:
    model = Tiny(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((3, 4), -float(value))
    return TrainState(model, optimizer, extra={"value": value})


def made(name: str, dtype: torch.dtype = torch.float32, *, steps: int = 0, ema: bool = True) -> TrainState:
    model = Small(dtype)
    optimizer = build(EVERY[name], model)
    averages = EMA.Config().build(model=model) if ema else None
    state = TrainState(model, optimizer, averages, {"step": steps})
    go_on(state, range(steps))
    return state


def go_on(state: TrainState, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses += train(state.model, state.optimizer, range(step, step + 1))
        if state.ema is not None:
            state.ema.update(state.model)
    return losses


def scrambled(state: TrainState) -> TrainState:
    """Other values everywhere, so that nothing can be right by itself."""
    with torch.no_grad():
        for tensor in (*state.model.parameters(), *(state.ema.averages.values() if state.ema else ())):
            tensor.fill_(7)
    return state


def contents(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, document = flatten(state, 0)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, document


def assert_same(one: tuple[dict[str, Tensor], dict[str, Any]], other: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        twin = other[0][name]
        assert tensor.dtype == twin.dtype and tensor.shape == twin.shape, name
        assert torch.equal(bits(tensor), bits(twin)), name


def bits(tensor: Tensor) -> Tensor:
    """Bytes: numbers that are not equal to themselves are compared too."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
