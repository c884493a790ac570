"""The stages of one pipeline in a line: hidden vectors go down it, their gradients come back up, and notes go to all.

Each direction has a group of its own, in which a stage sends and its neighbour receives in the same order. Two directions in one
group would wait for each other on GPUs, where what is sent is a queue. Sending waits for nobody; what was sent is kept until the
other side has it.

What arrives is known beforehand from the batch, which all stages have, except for the dtype and for what layers left behind on
their way (`Context.collected`). A first message for each kind of batch says these two, as JSON; after that nothing but numbers is
sent.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchard.core.errors import UnsupportedPair, UsageError
from orchard.train.parallel import Mesh

Left = dict[str, list[Tensor]]
"""What layers left behind, as in `Context.collected`."""
Form = dict[str, Any]
"""shape and dtype of hidden vectors; left: [name, dtype] of every number that goes with them."""


@dataclass
class Arrived:
    """What a stage reads. Both are leaves of its graph, so that their gradients can be sent back."""

    hidden: Tensor
    numbers: Tensor | None
    """[n], float64"""
    left: Left


@dataclass
class Sent:
    """What a stage gave, kept until its gradients are there and the next stage has it."""

    hidden: Tensor
    numbers: Tensor | None
    works: list[Any]
    """What is under way, with the memory that it is read from."""

    def settle(self) -> None:
        for work, _ in self.works:
            work.wait()
        self.works.clear()


class Line:
    """This process's place in the line. Made by all processes of the mesh at the same point."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.dims is not None and mesh.stages > 1
        self.stage, self.stages = mesh.stage, mesh.stages
        self.device = mesh.here.device
        limit = timedelta(seconds=mesh.here.timeout)
        for ranks in mesh.dims.mesh.flatten(1).T.tolist():  # everybody makes all groups, in the same order
            down, up, together = (dist.new_group(ranks, timeout=limit) for _ in range(3))
            ends = dist.new_group([ranks[0], ranks[-1]], timeout=limit)
            if mesh.here.rank in ranks:
                self._down, self._up, self._together, self.ends = down, up, together, ends
        self._said: dict[Hashable, Form] = {}
        self._heard: dict[Hashable, Form] = {}
        self._back: list[tuple[Any, Tensor]] = []

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    # Down the line ------------------------------------------------------------------------------------------------------

    def send(self, kind: Hashable, hidden: Tensor, left: Left) -> Sent:
        """Give the next stage what this one made of a batch of this kind."""
        flat = [(name, value) for name, values in left.items() for value in values]
        form = {
            "shape": list(hidden.shape),
            "dtype": _name(hidden.dtype),
            "left": [[name, _name(value.dtype)] for name, value in flat],
        }
        for name, value in flat:
            if value.ndim:
                raise UnsupportedPair(
                    f"a layer left {name} as a tensor of shape {list(value.shape)}, and a pipeline carries single numbers",
                    hint="leave a sum or a mean, or use mesh.data",
                )
        works = []
        if kind not in self._said:
            text = torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
            works = [self._give(torch.tensor([len(text)])), self._give(text)]
            self._said[kind] = form
        elif form != self._said[kind]:
            raise UsageError(
                f"stage {self.stage} gave {self._said[kind]} before, and now {form} for the same kind of batch",
                hint="make a new Pipeline after changing a model",
            )
        numbers = torch.stack([value.to(torch.float64) for _, value in flat]) if flat else None
        works += [self._give(tensor.detach()) for tensor in (hidden, numbers) if tensor is not None]
        return Sent(hidden, numbers, works)

    def receive(self, kind: Hashable) -> Arrived:
        """What the stage before made of a batch of this kind."""
        if kind not in self._heard:
            length = int(self._take(torch.empty(1, dtype=torch.int64)))
            text = self._take(torch.empty(length, dtype=torch.uint8))
            self._heard[kind] = json.loads(bytes(text.tolist()))
        form = self._heard[kind]
        hidden = self._take(torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=self.device))
        slopes = torch.is_grad_enabled()
        hidden.requires_grad_(slopes)
        if not form["left"]:
            return Arrived(hidden, None, {})
        numbers = self._take(torch.empty(len(form["left"]), dtype=torch.float64, device=self.device))
        numbers.requires_grad_(slopes)
        left: Left = {}
        for (name, dtype), value in zip(form["left"], numbers.unbind()):
            left.setdefault(name, []).append(value.to(getattr(torch, dtype)))
        return Arrived(hidden, numbers, left)

    # Back up ------------------------------------------------------------------------------------------------------------

    def send_back(self, arrived: Arrived) -> None:
        """The gradients of what arrived, to where it came from."""
        for tensor in (arrived.hidden, arrived.numbers):
            if tensor is not None:  # what was not used has no gradient, but the other side waits for one
                slope = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
                self._back.append((dist.isend(slope, group=self._up, group_dst=self.stage - 1), slope))

    def receive_back(self, sent: Sent) -> list[tuple[Tensor, Tensor]]:
        """What was sent, each with its gradient; without what nothing can be learnt from."""
        pairs = []
        for tensor in (sent.hidden, sent.numbers):
            if tensor is not None:
                slope = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                _wait(dist.irecv(slope, group=self._up, group_src=self.stage + 1))
                pairs += [(tensor, slope)] if tensor.requires_grad else []
        sent.settle()  # the next stage has used it
        return pairs

    def settle(self) -> None:
        """Until the stage before has all gradients."""
        for work, _ in self._back:
            work.wait()
        self._back.clear()

    # All together -------------------------------------------------------------------------------------------------------

    def told(self, note: Any, *, stage: int = -1) -> Any:
        """What one stage says (the last), on every stage: anything that JSON holds. Numbers come with all their digits."""
        speaker = stage % self.stages
        data = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, group=self._together, group_src=speaker)
        if self.stage != speaker:
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group=self._together, group_src=speaker)
        return json.loads(bytes(data.tolist()))

    def added(self, value: float) -> float:
        """The sum of a number over the stages, the same digits on each."""
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._together)
        return float(total)

    def joined(self, names: Sequence[str]) -> list[str]:
        """The names that any stage has, in the order of stages, each once."""
        found: dict[str, None] = {}
        for stage in range(self.stages):
            found |= dict.fromkeys(self.told(list(names), stage=stage))
        return list(found)

    def _give(self, tensor: Tensor) -> tuple[Any, Tensor]:
        tensor = tensor.to(self.device).contiguous()
        return dist.isend(tensor, group=self._down, group_dst=self.stage + 1), tensor

    def _take(self, into: Tensor) -> Tensor:
        into = into.to(self.device)
        _wait(dist.irecv(into, group=self._down, group_src=self.stage - 1))
        return into


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
