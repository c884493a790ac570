"""Small problems and the optimisers to try on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from orchard.train.optim import Adafactor, AdamW, AdamW8bit, Muon, Optimizer

EVERY: dict[str, Any] = {
    "adamw": AdamW.Config(lr=1e-2),
    "adamw plain": AdamW.Config(lr=1e-2, fused=False),
    "8bit": AdamW8bit.Config(lr=1e-2, smallest=64),
    "muon": Muon.Config(lr=1e-2),
    "muon shape": Muon.Config(lr=1e-2, matrix_lr=2e-2, scale="shape", nesterov=False),
    "adafactor": Adafactor.Config(lr=1e-2, momentum=0.9, decay=0.1),
    "adafactor absolute": Adafactor.Config(lr=1e-2, relative=False),
}


class Small(nn.Module):
    """An embedding, two hidden matrices, a stack of experts' matrices, a norm and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.up = nn.Linear(16, 32)
        self.experts = nn.Parameter(torch.randn(3, 8, 32) * 0.2)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 16, bias=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(self.embedding(ids)))
        x = torch.cat([x @ expert.T for expert in self.experts], -1)
        return self.head(self.down(self.norm(x)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """How badly each token's double (modulo 20) is told, on tokens of the step's own."""
    ids = torch.randint(0, 20, (32,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids).float(), ids * 2 % 20)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build(cfg: Any, model: nn.Module) -> Optimizer:
    made: Optimizer = cfg.build(named_parameters=model.named_parameters())
    return made
