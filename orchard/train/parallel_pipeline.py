"""Pipelines: each stage computes some of the layers, and micro-batches follow each other through them.

All stages get the whole batch, and send each other hidden vectors and their gradients only. Two orders of work:

- `1f1b` (one forward, one backward; arXiv 1806.03377, and with one update for all micro-batches 2006.09503): a stage runs ahead
  only until gradients come back, so that it keeps at most as many micro-batches as there are stages from it to the last.
- `gpipe` (arXiv 1811.06965): all forward passes, then all backward passes. As fast, with every micro-batch in memory.

In both a stage adds gradients up in the order of micro-batches, so both give the same bits. The last stage takes the backward
pass of a micro-batch right after its forward pass. A step of n micro-batches on s stages leaves each of them without work for
(s - 1) / (n + s - 1) of the time: use several times as many micro-batches as stages.

Objectives run on the last stage and know nothing of this. The model they are shown is the last stage, which gives hidden vectors
for the tokens of the batch (and for no others) from what came through the stages before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchard.core.batch import Batch, Loss, Movable
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.core.seeds import fold
from orchard.objectives.base import Objective
from orchard.train.parallel import Mesh
from orchard.train.parallel_line import Arrived, Line, Sent
from orchard.train.parallel_shards import exchange
from orchard.train.parallel_stages import layers_kept

Cast = Callable[[], AbstractContextManager[Any]]
SEEDS = 2**63


class Pipeline:
    """A model that `spread` has cut into stages, run as one. Every process makes one and makes the same calls.

    It is also what `Clip` asks about the other stages: `clip(named, scale=…, others=pipeline)`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.stages < 2:
            raise UsageError(
                f"a pipeline of {mesh.stages} stage", hint="use mesh.pipeline of at least 2, or no Pipeline"
            )
        if layers_kept(model) is None:
            raise UsageError("this model was not cut into stages", hint="call spread(model, mesh) before Pipeline(…)")
        self.model: Any = model
        self.mesh = mesh
        self.line = Line(mesh)
        tied = self.model.head is None and (self.line.first or self.line.last)
        named = self.model.named_parameters() if tied else ()
        self._tied = [p for name, p in named if name.startswith("embedding.") and p.requires_grad]

    # Learning -----------------------------------------------------------------------------------------------------------

    def gradients(self, parts: Sequence[Any], objective: Objective, cast: Cast = nullcontext) -> dict[str, Tensor]:
        """Forward and backward passes of all micro-batches, which leave gradients of sums at the parameters. What comes back, on
        every stage alike, are the sums over them: "" the value, " " the weight, and every part by its name."""
        if not parts:
            raise UsageError("a step without micro-batches", hint="give at least one")
        if not self.line.first:  # dropout of different layers has different numbers
            torch.manual_seed(fold(torch.initial_seed() % SEEDS, "stage", self.line.stage))
        flows = [_Flow(part) for part in parts]
        sums: dict[str, Tensor] = {}
        for forward, number in order(self.mesh.config.schedule, self.line.stage, self.line.stages, len(parts)):
            flow = flows[number]
            if forward:
                self._forward(flow, objective, cast)
            else:
                self._exchange(number == len(parts) - 1)
                self._backward(flow, sums)
        self.line.settle()
        self._add_tied()
        return self._tensors(self.line.told({name: float(total) for name, total in sums.items()}))

    @torch.no_grad()
    def loss(self, batch: Any, objective: Objective, cast: Cast = nullcontext) -> Loss:
        """The loss of a batch without gradients, on every stage alike."""
        flow = _Flow(batch)
        self._forward(flow, objective, cast)
        for sent in flow.sent:
            sent.settle()
        said = self.line.told({} if flow.loss is None else {name: float(x) for name, x in _sums(flow.loss)})
        found = self._tensors(said)
        return Loss(value=found.pop(""), weight=found.pop(" "), parts=found)

    # Of the other stages ------------------------------------------------------------------------------------------------

    def counts(self, name: str) -> bool:
        """Whether this stage's copy of a parameter is the one that counts: of a tied table the first stage's."""
        return self.line.first or self.model.head is not None or not name.startswith("embedding.")

    def added(self, value: float) -> float:
        """The sum of a number over the stages, the same digits on each."""
        return self.line.added(value)

    def joined(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names that any stage has."""
        return tuple(self.line.joined(names))

    # Inside -------------------------------------------------------------------------------------------------------------

    def _forward(self, flow: _Flow, objective: Objective, cast: Cast) -> None:
        with cast():
            for batch in flow.reads:
                kind = self._kind(batch)
                arrived = None if self.line.first else self.line.receive(kind)
                if arrived is not None:
                    flow.arrived.append(arrived)
                if self.line.last:
                    continue
                context = Context(positions=batch.positions, documents=batch.documents)
                context.collected = {} if arrived is None else arrived.left
                hidden = self.model.hidden(batch.ids if arrived is None else arrived.hidden, context)
                flow.sent.append(self.line.send(kind, hidden, context.collected))
            if self.line.last:
                flow.loss = objective(_Shown(self.model, flow), flow.part)

    def _backward(self, flow: _Flow, sums: dict[str, Tensor]) -> None:
        if flow.loss is not None:
            flow.loss.value.backward()
            for name, found in _sums(flow.loss):
                sums[name] = found if name not in sums else sums[name] + found
        else:
            pairs = [pair for sent in flow.sent for pair in self.line.receive_back(sent)]
            if pairs:
                outs, slopes = zip(*pairs)
                torch.autograd.backward(outs, slopes)
        self.line.settle()  # of the micro-batch before: its memory can go
        for arrived in flow.arrived:
            self.line.send_back(arrived)
        flow.clear()

    def _exchange(self, last: bool) -> None:
        """Where every process has whole parameters, it may as well hold whole gradients until the last micro-batch."""
        if not self.mesh.config.shard:
            exchange(self.model, last)

    @torch.no_grad()
    def _add_tied(self) -> None:
        """Both ends learn the same table: each has its share of the gradient, and both go on with the sum."""
        for parameter in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine: Any = parameter.grad
            dist.all_reduce(mine.to_local() if hasattr(mine, "to_local") else mine, group=self.line.ends)

    def _kind(self, batch: Batch) -> Hashable:
        """What the form of hidden vectors depends on."""
        device = self.line.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return tuple(batch.ids.shape), narrow, torch.is_grad_enabled()

    def _tensors(self, said: Mapping[str, float]) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64, device=self.line.device) for name, value in said.items()}


@dataclass
class _Flow:
    """One micro-batch on its way through this stage."""

    part: Any
    arrived: list[Arrived] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    loss: Loss | None = None

    def __post_init__(self) -> None:
        self.reads = list(batches_of(self.part))

    def clear(self) -> None:
        """Graphs hold a micro-batch's memory."""
        self.arrived, self.sent, self.loss = [], [], None


class _Shown:
    """The last stage as objectives see a model."""

    def __init__(self, model: Any, flow: _Flow) -> None:
        self._model = model
        self._flow = flow

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        for batch, arrived in zip(self._flow.reads, self._flow.arrived, strict=True):
            same = ids is batch.ids and context.positions is batch.positions and context.documents is batch.documents
            if same and context.cache is None:
                for name, values in arrived.left.items():
                    context.collected.setdefault(name, [])[:0] = values
                out: Tensor = self._model.hidden(arrived.hidden, context)
                return out
        raise UnsupportedPair(
            "an objective asks for hidden vectors of other tokens than its batch holds, and only those came through the pipeline",
            hint="use mesh.data for this objective",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def order(schedule: str, stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """What a stage does: (forward?, number of the micro-batch)."""
    after = stages - 1 - stage
    ahead = min(count, after if schedule == "1f1b" or not after else count)
    yield from ((True, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield True, number + ahead
        yield False, number


def batches_of(part: Any) -> Iterator[Batch]:
    """The rows of tokens that a batch of any kind holds: its own, or those of each side."""
    if isinstance(part, Batch):
        yield part
    elif isinstance(part, Movable):
        for item in fields(part):  # type: ignore[arg-type]
            value = getattr(part, item.name)
            yield from batches_of(value) if isinstance(value, Movable) else ()
    else:
        raise ConfigError(
            f"a {type(part).__name__} is no batch that a pipeline knows", hint="use a Batch of core.batch"
        )


def _sums(loss: Loss) -> Iterator[tuple[str, Tensor]]:
    for name, total in (("", loss.value), (" ", loss.weight), *loss.parts.items()):
        yield name, total.detach().double()
