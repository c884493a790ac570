"""A feed-forward layer whose weights stay in a file: each token brings in the neurons it will use and that are not there yet.

Everything else of the model is in memory. The layer asks its predictor (or, to be exact, the map that decides, which it then
keeps in memory) which neurons the token uses, loads those that the last tokens did not use, and computes with rows that lie one
after another. A long prompt uses nearly all neurons: those that only its first tokens want are read, used and forgotten.

Answers do not depend on what other tokens left behind: a neuron that is there but was not predicted stays silent. With `extras`
it speaks, which is nearer to the whole model at no cost, but then the same question may be answered in other words.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.cache.experts import BudgetTooSmall, OtherModel
from orchard.cache.neurons import NeuronBuffer, NeuronWindow, Tally
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UsageError
from orchard.transforms.neurons_file import CHUNK, NeuronLayer

PREDICTED, EXACT = "predicted", "exact"
LEAST = 0.02
"""Of a layer's neurons: with room for fewer, nearly all of every token's would be read and forgotten."""


class NeuronMLP(Configurable, nn.Module):
    """down(relu(gate(x)) · up(x)), or without a gate, over the neurons that a token uses."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        file: str = REQUIRED
        name: str = REQUIRED
        """The layer's path in the model that the file was written from."""
        activity: str = PREDICTED
        window: int = 5
        """How many tokens back a neuron's last use may lie; 0: nothing stays from token to token."""
        capacity: int | None = None
        """Neurons in memory at most; None: as many as the window holds."""
        extras: bool = False
        join: bool = True
        direct: bool = False
        """Read past the system's page cache."""

        def wire(self) -> None:
            if self.activity not in (PREDICTED, EXACT):
                raise ConfigError(f"activity is {self.activity!r}", hint=f"use {PREDICTED} or {EXACT}")

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self._lock = threading.Lock()
        with torch.device("cpu"):  # a model is built on the meta device first; what lies in a file needs no filling
            self.store = NeuronLayer.open(cfg.file, cfg.name, direct=cfg.direct)
            self._check(cfg)
            self._activity = self._decided_by(cfg.activity)
            capacity = cfg.hidden_dim if cfg.capacity is None else min(cfg.capacity, cfg.hidden_dim)
            least = max(1, int(LEAST * cfg.hidden_dim))
            if capacity < least:
                row = 4 * self.store.width
                what = f"{least} of the {cfg.hidden_dim} neurons of {cfg.name}"
                raise BudgetTooSmall(budget=capacity * row, needed=least * row, what=what)
            buffer = NeuronBuffer(cfg.hidden_dim, self.store.width, capacity=capacity)
        self.window = NeuronWindow(buffer, cfg.window)
        self._all_speak = (
            cfg.extras or cfg.activity == EXACT
        )  # where nobody is missed, those not named are silent anyway
        self.store.records.reads = self.store.records.bytes = 0  # from here on: what tokens cost

    @property
    def tally(self) -> Tally:
        return self.window.tally

    @torch.no_grad()
    def active(self, x: Tensor) -> Tensor:
        """Which neurons [..., hidden_dim] are taken to be active for x [..., dim]."""
        weight, other, bias = self._activity
        before = functional.linear(x, weight)
        return (before + bias if other is None else functional.linear(before, other, bias)) > 0

    def forward(self, x: Tensor, context: Context) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).to("cpu", torch.float32)
        real = context.positions.reshape(-1, 1).cpu() >= 0
        with self._lock:
            active = self.active(rows) & real
            y = self._run(rows, active, active.view(-1, x.shape[-2], active.shape[-1]).any(0))
        bias = self.store.fixed.get("down.bias")
        y = y if bias is None else y + bias
        return y.view(x.shape).to(x.device, x.dtype)

    def __deepcopy__(self, memo: Any) -> NeuronMLP:
        made: NeuronMLP = self.config.build()
        return made

    # Inside -----------------------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, active: Tensor, tokens: Tensor) -> Tensor:
        """`tokens` [T, units]: what is used at each place, whatever the row of the batch."""
        first = max(0, len(tokens) - self.config.window)
        recent = [np.flatnonzero(token) for token in tokens[first:].numpy()]
        wanted = np.flatnonzero(tokens.any(0).numpy())
        buffer = self.window.buffer
        plan = self.window.begin(wanted, recent, len(tokens))
        self._bring(plan.stay)
        y = self._spoken(x, buffer.matrix(), None if self._all_speak else active, buffer.resident())
        for start in range(0, len(plan.passing), CHUNK):
            some = plan.passing[start : start + CHUNK]
            y += self._spoken(x, self.store.read(some, join=self.config.join), active, some)
        self.window.end(plan)
        return y

    def _bring(self, units: np.ndarray) -> None:
        """Load neurons to stay: all, or where one cannot be read, none."""
        done = 0
        try:
            for start in range(0, len(units), CHUNK):
                some = units[start : start + CHUNK]
                self.window.buffer.append(some, self.store.read(some, join=self.config.join))
                done += len(some)
        except BaseException:
            self.window.buffer.drop(units[:done])
            raise

    def _spoken(self, x: Tensor, rows: Tensor, active: Tensor | None, units: np.ndarray) -> Tensor:
        parts = self.store.parts
        hidden = self._map(x, rows, "up")
        if "gate" in parts:
            hidden = functional.relu(self._map(x, rows, "gate")) * hidden
        else:
            hidden = functional.relu(hidden)
        if active is not None:
            hidden = hidden * active[:, torch.from_numpy(units)]
        return hidden @ rows[:, parts["down"]]

    def _map(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        before = x @ rows[:, self.store.parts[name]].mT
        bias = self.store.parts.get(f"{name}.bias")
        return before if bias is None else before + rows[:, bias].mT

    def _check(self, cfg: Config) -> None:
        found = (self.store.parts["down"].stop - self.store.parts["down"].start, self.store.units)
        if found != (cfg.dim, cfg.hidden_dim):
            raise OtherModel(
                f"{self.store.records.path.name} has {found[1]} neurons of width {found[0]} for {cfg.name}, and the model "
                f"has {cfg.hidden_dim} of {cfg.dim}",
                hint="write the neurons of this model",
            )

    def _decided_by(self, kind: str) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weight, a second weight or none, and bias of the map whose sign tells which neurons are active."""
        if kind == EXACT:
            name = "gate" if "gate" in self.store.parts else "up"
            rows = self.store.read(np.arange(self.store.units))
            bias = self.store.parts.get(f"{name}.bias")
            none = torch.zeros(len(rows))
            return rows[:, self.store.parts[name]].clone(), None, none if bias is None else rows[:, bias][:, 0].clone()
        made = self.store.predictor()
        if made is None:
            raise UsageError(
                f"{self.store.records.path.name} has no predictor for {self.config.name}",
                hint="write it with predictors (`Activity().fit`), or use activity='exact'",
            )
        return made.a.detach(), made.b.detach(), made.bias.detach()
