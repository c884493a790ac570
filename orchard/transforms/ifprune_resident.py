"""A decoder whose groups of hidden units live in a file, of which only those that are chosen are in memory.

    write_groups(model, path)                                       # one record a group: rows of gate and up, columns of down
    stored = Stored(model, Records.open(path), budget_bytes=…)      # all but the groups stays in memory
    one = Answering(stored, prompt_ids, every=32, margin=0.5)       # runs one sequence: chooses, reads, chooses anew

A choice is read once and serves every token until it is made anew, so that bytes a token fall with the length of an answer (AFM 3
Core Advanced). A larger budget of the same ranking reads the difference and nothing else. Bytes are counted where they are asked
for (`stored.counters`): a page cache hides nothing. Sequences with other choices share the memory; what they do not have room for
together is read again by turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchard.cache.experts import Counters, Records, Resident, Source, policy_named, write_records
from orchard.core.context import Context
from orchard.core.errors import UsageError
from orchard.nn.mlp import activation
from orchard.nn.tensors import dense_tensor
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import choosing
from orchard.transforms.ifprune_mlp import SubnetMLP
from orchard.transforms.lora_twin import replaced

PARTS = ("gate", "up", "down")


def write_groups(decoder: nn.Module, path: Path | str, facts: dict[str, Any] | None = None) -> None:
    """All groups of a decoder's layers, a record each. `facts` say whose they are."""
    layers = choosing(decoder)
    if not layers:
        raise UsageError("no layer of this decoder has groups", hint="apply IFPrune to it first")
    sources = [Source(name, part.config.groups, _unit(part)) for name, part in layers.items()]
    write_records(path, sources, facts)


def _unit(part: SubnetMLP) -> Any:
    cfg = part.config
    rows = [dense_tensor(getattr(part, name), "weight").detach() for name in PARTS]
    rows[2] = rows[2].mT

    def unit(group: int) -> dict[str, Tensor]:
        start = cfg.shared + group * cfg.size
        return {name: whole[start : start + cfg.size] for name, whole in zip(PARTS, rows, strict=True)}

    return unit


class StoredMLP(nn.Module):
    """The shared units in memory, the chosen groups from the slots of a `Resident`."""

    def __init__(self, part: SubnetMLP, resident: Resident) -> None:
        super().__init__()
        cfg = part.config
        self.config = cfg
        self.act = activation(cfg.activation)
        self.resident = resident
        for name in PARTS:
            whole = dense_tensor(getattr(part, name), "weight").detach()
            rows = (whole.mT if name == "down" else whole)[: cfg.shared].clone()
            self.register_parameter(name, nn.Parameter(rows, requires_grad=False))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weights = None if context.units is None else context.units.get(self.config.place)
        if weights is None:
            weights = x.new_ones(1, 1, self.config.groups)
        used = weights.flatten(0, -2).amax(0).nonzero()[:, 0].tolist()
        place = self.config.place
        y = _gated(self.act, x, self.gate, self.up, self.down) if self.config.shared else torch.zeros_like(x)  # type: ignore[arg-type]
        for group, slot in zip(used, self.resident.ensure(place, used), strict=True):
            arrays = self.resident.arrays(place, slot)
            y = y + _gated(self.act, x, *(arrays[name] for name in PARTS)) * weights[..., group, None].to(x.dtype)
        return y


def _gated(act: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (act(x @ gate.mT) * (x @ up.mT)) @ down


class Stored:
    """A decoder over a file of groups, with who chooses for it (`Instructed`, or anything with `choose(ids, budget)`).

    `budget_bytes` is what groups may take in memory; less than one layer's choice is refused (`BudgetTooSmall`).
    """

    def __init__(self, model: Any, records: Records, *, budget_bytes: int, policy: str = "lru", threads: int = 2) -> None:
        layers = choosing(model.decoder)
        found = [(layer.name, layer.units) for layer in records.layers]
        if found != [(name, part.config.groups) for name, part in layers.items()]:
            raise UsageError(f"{records.path.name} holds the groups of another model", hint="write them with this one")
        self.chooser = model
        working = int(model.config.budgets[0])
        self.resident = Resident(records, budget_bytes, policy_named(policy), working_set=working, threads=threads)
        makers = {name: lambda part: StoredMLP(part, self.resident) for name in layers}
        self.decoder: Any = replaced(model.decoder, makers)
        self.decoder.eval()

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        found: torch.device = self.decoder.device
        return found

    @property
    def counters(self) -> Counters:
        """Bytes, reads, hits and so on of groups."""
        return self.resident.counters

    @property
    def nbytes(self) -> int:
        """Weights in memory: all but the groups, and the slots for these."""
        return sum(part.nbytes for part in self.decoder.parameters()) + self.resident.nbytes

    def choose(self, ids: Any, budget: int | None = None) -> Choice:
        choice: Choice = self.chooser.choose(ids, budget)
        return choice

    def load(self, choice: Choice) -> None:
        """Read what a choice needs and is not there."""
        for layer, groups in enumerate(choice.groups()):
            self.resident.ensure(layer, groups)

    def prefetch(self, choice: Choice) -> None:
        """Begin to read it, and return at once."""
        for layer, groups in enumerate(choice.groups()):
            self.resident.prefetch(layer, groups)

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        out: Tensor = self.decoder.hidden(ids, context)
        return out

    def scores(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.decoder.scores(hidden)
        return out

    def cache(self, *, batch: int, length: int) -> Any:
        return self.decoder.cache(batch=batch, length=length)

    def close(self) -> None:
        self.resident.close()
        self.resident.records.close()
