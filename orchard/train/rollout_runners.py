"""What runs the model that writes: torch one answer at a time, torch all of them together, or a plan of its present weights.

Whatever it is, `Tempered` divides its scores by the temperature before anybody sees them. So tokens are chosen from, and their
log-probabilities are of, one and the same law: that of the model at that temperature, as the objective computes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from orchard.core.context import Context
from orchard.core.errors import OrchardError, UsageError
from orchard.generate.lowering import lower
from orchard.generate.protocol import Held, Runner, Shape, Use, Work
from orchard.generate.torch_forward import TorchRunner
from orchard.ops.kernels.native import why_not
from orchard.ops.plan.steps import Plan
from orchard.train.parallel_stages import layers_kept

GRAIN = 32
"""Stores are looked at up to a multiple of this, so that shapes change seldom."""
COLUMNS = 128
"""Tokens of each sequence in one call of the model: long prompts are read in pieces, which bounds memory."""


class Tempered:
    """A runner whose scores are divided by a temperature."""

    def __init__(self, runner: Runner, temperature: float) -> None:
        self._runner = runner
        self._temperature = temperature

    @property
    def config(self) -> Shape:
        return self._runner.config

    def slots(self, count: int) -> Any:
        slots = self._runner.slots(count)
        return slots if self._temperature == 1 else _TemperedSlots(slots, self._temperature)


class _TemperedSlots:
    """The slots of another runner in everything but their scores."""

    def __init__(self, slots: Any, temperature: float) -> None:
        self._slots = slots
        self._temperature = np.float32(temperature)

    def __getattr__(self, name: str) -> Any:
        if name == "greedy_many":  # a device that chooses by itself knows nothing of temperatures
            raise AttributeError(name)
        return getattr(self._slots, name)

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        return [scores / self._temperature for scores in self._slots.run(work)]


class TogetherRunner:
    """A torch model with one store for many sequences: each call runs all that have a token to read at once.

    Much quicker than one after another, and as exact as the model is in training, where rows share calls as well. What a token
    is given may differ in its last bits with the number of rows, though not with what is in them.
    """

    def __init__(self, model: Any, length: int) -> None:
        """`length`: no sequence will be longer, its prompt included."""
        self.model = model
        self.length = length

    @property
    def config(self) -> Shape:
        shape: Shape = self.model.config
        return shape

    def slots(self, count: int) -> TogetherSlots:
        return TogetherSlots(self.model, count, self.length)


class TogetherSlots:
    """See `orchard.generate.protocol.Slots`."""

    copies = False
    goes_back = False

    @torch.inference_mode()
    def __init__(self, model: Any, count: int, length: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self._model = model
        self._most = length
        self._cache = model.cache(batch=count, length=_grown(length))
        self._seen = 0
        """Slots of the stores that any sequence may have filled."""

    @torch.inference_mode()
    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        if length > self._most:
            raise UsageError(
                f"a sequence of {length:,} tokens in stores for {self._most:,}", hint="ask for fewer tokens"
            )
        self.lengths[slot] = 0
        for table in self._cache.tables.values():  # whatever the sequence before left behind
            table.positions[slot] = -1
        return 0

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        width = max(len(one.tokens) for one in work)
        ids = np.zeros((self.count, width), np.int64)
        positions = np.full((self.count, width), -1, np.int64)
        for one in work:
            start, tokens = self.lengths[one.slot], len(one.tokens)
            ids[one.slot, :tokens] = one.tokens
            positions[one.slot, :tokens] = np.arange(start, start + tokens)
            self.lengths[one.slot] = start + tokens
        read = [
            self._read(ids[:, at : at + COLUMNS], positions[:, at : at + COLUMNS]) for at in range(0, width, COLUMNS)
        ]
        rows = [one.slot for one in work for _ in range(one.wanted)]
        places = [place for one in work for place in range(len(one.tokens) - one.wanted, len(one.tokens))]
        if not rows:
            return [np.empty((0, self._model.config.vocab), np.float32) for _ in work]
        hidden = torch.stack(
            [read[place // COLUMNS][row, place % COLUMNS] for row, place in zip(rows, places, strict=True)]
        )
        scores = self._model.scores(hidden).float().cpu().numpy()
        ends = np.cumsum([one.wanted for one in work])
        return [scores[end - one.wanted : end] for one, end in zip(work, ends, strict=True)]

    def _read(self, ids: np.ndarray, positions: np.ndarray) -> Tensor:
        """What the head reads after each of these tokens: [count, T, dim]."""
        device, upto = self._model.device, _grown(int(positions.max()) + 1)
        context = Context(
            positions=torch.from_numpy(positions).to(device), cache=self._cache, upto=max(upto, self._seen)
        )
        self._seen = context.upto or 0
        hidden: Tensor = self._model.hidden(torch.from_numpy(ids).to(device), context)
        return hidden

    def back(self, slot: int, tokens: int) -> None:
        raise UsageError("these stores do not go back", hint="sample without speculation")

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def hidden(self, slot: int) -> np.ndarray | None:
        return None

    def close(self, slot: int) -> None:
        self.lengths[slot] = 0

    def nbytes(self, length: int) -> int:
        """The stores are all there from the beginning: no sequence takes more."""
        return 0


def _grown(tokens: int) -> int:
    return -(-tokens // GRAIN) * GRAIN


def _plan(model: Any, length: int, threads: int | None) -> Runner:
    if missing := why_not():
        raise UsageError(f"no native kernels: {missing}", hint="use the runner together, or auto")
    if model.device.type != "cpu":
        raise UsageError(f"the native engine writes on a CPU, and the model is on {model.device}", hint="use together")
    from orchard.generate.native import NativeRunner

    return NativeRunner(lowered(model), threads=threads, decoder=lambda: model)


def _auto(model: Any, length: int, threads: int | None) -> Runner:
    """A plan where one can be made that needs no torch."""
    if model.device.type == "cpu" and not why_not():
        from orchard.generate.native import NativeRunner

        with suppress(OrchardError):  # the model says that it has none
            plan = lowered(model)
            if plan.whole:
                return NativeRunner(plan, threads=threads)
    return TogetherRunner(model, length)


RUNNERS: dict[str, Callable[[Any, int, int | None], Runner]] = {
    "auto": _auto,
    "together": lambda model, length, threads: TogetherRunner(model, length),
    "alone": lambda model, length, threads: TorchRunner(model),
    "plan": _plan,
}


def obstacle(model: Any) -> str:
    """Why a model cannot write on every process by itself; empty where it can. Stores are made for all heads of all layers."""
    if not isinstance(model, nn.Module):
        return ""
    if layers_kept(model) is not None:
        return "mesh.pipeline: no process has all layers"
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and "tensor" in (mesh.mesh_dim_names or ()) and mesh["tensor"].size() > 1:
            return "mesh.tensor: no process has all heads of a layer"
    return ""


def lowered(model: Any) -> Plan:
    """The plan of a model's present weights."""
    with _plain(model):
        return lower(model)


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Torch gives modules that it shares out another class, hooks, and weights whose memory comes and goes. For as long as they
    are asked for a plan they are what they were, with copies of the weights."""
    shared = [module for module in model.modules() if isinstance(module, FSDPModule)]
    changed: list[Any] = list(model.modules()) if shared else []
    before = [(module, type(module), dict(module.__dict__)) for module in changed]
    try:
        for module in shared:
            module.__class__ = next(base for base in type(module).__bases__ if base is not FSDPModule)
            module.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
        for module in changed:
            own = {
                name: None if value is None else value.detach().clone() for name, value in module._parameters.items()
            }
            module.__dict__["_parameters"] = own
        yield
    finally:
        for module, kind, kept in before:
            module.__class__ = kind
            module.__dict__.update(kept)


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """A model that is in shards, put together on every process for as long as it writes: processes write different numbers of
    tokens, so no call may have to wait for the others."""
    modules = [module for module in getattr(model, "modules", tuple)() if isinstance(module, FSDPModule)]
    groups = [(module, module._get_fsdp_state()._fsdp_param_group) for module in modules]
    before = [(module, group, group.post_forward_mesh_info) for module, group in groups if group is not None]
    try:
        for module, group, _ in before:
            group.post_forward_mesh_info = None  # stay whole after a forward pass
            module.unshard()
        yield
    finally:
        for module, group, info in before:
            group.post_forward_mesh_info = info
            module.reshard()
