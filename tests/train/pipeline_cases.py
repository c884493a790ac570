"""A loop that trains on one process or on the stages of a pipeline, and what is trained in the tests of both."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Batch, GroupBatch, PairBatch
from orchard.models.language.decoder import Decoder
from orchard.objectives.base import Objective
from orchard.objectives.collected import with_collected
from orchard.objectives.distill import Distill
from orchard.objectives.lm import NextToken
from orchard.objectives.policy import PolicyGradient
from orchard.objectives.preference import Preference
from orchard.train.checkpoint import Checkpoints, TrainState
from orchard.train.clip import Clip
from orchard.train.ema import EMA
from orchard.train.optim import AdamW, AdamW8bit
from orchard.train.parallel import Mesh, Spread, spread
from orchard.train.parallel_pipeline import Pipeline
from orchard.train.parallel_sums import gathered, totals
from orchard.train.recompute import Recompute, recompute
from orchard.train.world import World
from tests.train.parallel_program import batches, build

LAYERS = 4


@dataclass
class Case:
    """What is trained, and how it is cut. Built from JSON, so that processes can be told."""

    mesh: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    objective: str = "next"
    steps: int = 20
    every: int = 0
    micro: int = 1
    times: int = 1
    """Batches in one step."""
    compute: str | None = None
    cast: bool = False
    eight: bool = False
    """AdamW in 8 bits, whose states cannot be cut."""


class Run:
    """One process's share of a run."""

    def __init__(self, case: Case, here: World) -> None:
        self.case, self.here = case, here
        self.mesh = Mesh.Config(**case.mesh).build(here=here)
        self.model: Any = build(case.kind, LAYERS)
        recompute(self.model, Recompute.Config(every=case.every))
        spread(self.model, self.mesh, Spread.Config(compute=case.compute))
        self.pipeline = Pipeline(self.model, self.mesh) if self.mesh.stages > 1 else None
        self.objective = objective(case.objective)
        self.trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        optim = AdamW8bit.Config(lr=1e-2, smallest=64) if case.eight else AdamW.Config(lr=1e-2)
        self.optimizer = optim.build(named_parameters=self.trained)
        self.ema = EMA.Config(decay=0.9).build(model=self.model)
        self.clip = Clip.Config(limit=1.0).build()
        self.curves: dict[str, list[Any]] = {"losses": [], "norms": [], "parts": [], "held out": []}

    def go(self, steps: range) -> None:
        for number in steps:
            torch.manual_seed(number)
            first = number * self.case.times
            read = batches(first + self.case.times)[first:]
            parts = [part for batch in read for part in self._parts(wanted(self.case.objective, batch))]
            sums = totals(self._gradients(parts), self.mesh)
            value, weight = sums.pop(""), sums.pop(" ")
            norm = self.clip(self.trained, scale=1 / weight, others=self.pipeline)
            self.curves["losses"].append(value / weight)
            self.curves["norms"].append(norm.value)
            self.curves["parts"].append(sums)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update(self.model)
        self.curves["held out"].append(self.held_out())

    def held_out(self) -> list[float]:
        batch = wanted(self.case.objective, batches(1)[0])
        if self.pipeline is not None:
            loss = self.pipeline.loss(batch, self.objective, self._cast)
        else:
            with torch.no_grad(), self._cast():
                loss = self.objective(self.model, batch)
        return [float(loss.value), float(loss.weight), *(float(loss.parts[name]) for name in sorted(loss.parts))]

    def state(self) -> TrainState:
        return TrainState(self.model, self.optimizer, self.ema, {"seed": 0})

    def save(self, folder: Path, step: int) -> None:
        Checkpoints(folder).save(step, self.state(), wait=True)

    def load(self, folder: Path) -> int:
        return Checkpoints(folder).load(self.state())

    def result(self) -> dict[str, Any]:
        """Curves, and of every weight and average its size and a digest, by the stages that have it."""
        held: dict[str, list[Any]] = {}
        averages = {"average of " + name: tensor for name, tensor in self.ema.averages.items()}
        for name, tensor in (*self.model.named_parameters(), *averages.items()):
            held[name] = _shown(tensor)
        together: dict[str, list[Any]] = {}
        for each in gathered(held, self.here):
            for name, shown in each.items():
                together.setdefault(name, []).append(shown)
        same = {name: all(one == found[0] for one in found) for name, found in together.items()}
        sizes = {name: found[0][0] for name, found in together.items()}
        return {**self.curves, "weights": sizes, "differ": [name for name in same if not same[name]]}

    def _gradients(self, parts: list[Any]) -> dict[str, Tensor]:
        if self.pipeline is not None:
            return self.pipeline.gradients(parts, self.objective, self._cast)
        sums: dict[str, Tensor] = {}
        for part in parts:
            with self._cast():
                loss = self.objective(self.model, part)
            loss.value.backward()
            for name, found in (("", loss.value), (" ", loss.weight), *loss.parts.items()):
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + found.detach().double()
        return sums

    def _parts(self, batch: Any) -> list[Any]:
        rows = len(batch) // self.mesh.data
        mine = range(rows * self.mesh.data_rank, rows * (self.mesh.data_rank + 1), self.case.micro)
        return [batch.part(start, start + self.case.micro) for start in mine]

    def _cast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.case.cast else nullcontext()


def run(case: Case, here: World) -> dict[str, Any]:
    one = Run(case, here)
    one.go(range(case.steps))
    return one.result()


def objective(name: str) -> Objective:
    """Chunks of 8 tokens, so that the head's gradients are taken chunk by chunk."""
    made: Any
    if name == "collected":
        made = with_collected(NextToken.Config(chunk=8), {"moe.balance": 0.5}).build()
    elif name == "distill":
        made = Distill.Config(chunk=8, top_k=5, hard=0.2).build(teacher=_other())
    elif name == "preference":
        made = Preference.Config(chunk=8).build(reference=_other())
    elif name == "policy":
        made = PolicyGradient.Config(chunk=8, kl=0.1).build(reference=_other())
    else:
        made = NextToken.Config(chunk=8).build()
    return made


def wanted(name: str, batch: Batch) -> Any:
    """A batch of the kind that an objective reads."""
    if name == "preference":
        flipped = Batch(batch.ids.flip(0), batch.targets.flip(0), batch.positions.flip(0), batch.documents.flip(0))
        return PairBatch(batch, flipped)
    if name == "policy":
        made = torch.Generator().manual_seed(3)
        behaviour = -4 + 0.1 * torch.randn(batch.targets.shape, generator=made)
        return GroupBatch(batch, behaviour, torch.tensor([1.0, -1.0, 0.5, 0.0]), torch.tensor([0, 0, 1, 1]))
    return batch


def _other() -> Decoder:
    """A teacher or a reference: the same tree, other weights."""
    model = build("", LAYERS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model.eval().requires_grad_(False)


def _shown(tensor: Any) -> list[Any]:
    plain = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    digest = hashlib.sha256(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return [float(plain.double().square().sum().sqrt()), digest]
