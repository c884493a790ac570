"""Blocks compiled by torch.compile, each kind once, with the reason where one cannot be.

A block reads and writes its step's context, which is different for every layer: dictionaries that grow, a layer's own number.
Compiled as it stands, each layer would be compiled for itself. So what is compiled is a function of tensors alone: it makes a
small context of its own inside, and what a block leaves behind (keys and values, collected losses) comes back as results and is
put into the real context outside. A block that reads another layer's keys and values is handed those along. Blocks of the same
class, shapes and settings then share one compilation.

Blocks that are run with stores, or that torch cannot trace as one graph, are run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.blocks import layers_of
from orchard.core.context import Context, KVView, Rotate

MOST = 64
"""Compilations of one kind of block."""
LENT = -1
"""Under this number a block finds keys and values that it borrows for one step."""
_models = count(1)
Result = tuple[Tensor, "KVView | None", dict[str, list[Tensor]]]


@dataclass
class Compiled:
    """What became of a model's blocks: how many are compiled, and why others are not (by the name of the block)."""

    blocks: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """Grows when a block is first run: only then does torch see whether it can be compiled."""


def compiled(model: nn.Module, *, backend: str = "inductor", dynamic: bool | None = False) -> Compiled:
    """Compile the blocks of a model, in place, when they are first run. Before `recompute` and `spread`."""
    names = {module: name for name, module in model.named_modules()}
    report = Compiled()
    _allow_more()
    shared: dict[type, Callable[..., Result]] = {}
    for layer in layers_of(model):
        name = names[layer]
        kind = type(layer)
        if kind not in shared:
            shared[kind] = torch.compile(_alone(kind), fullgraph=True, dynamic=dynamic, backend=backend)
        layer.__dict__["_compiled"] = _Slot(name, shared[kind], report)
        layer.forward = MethodType(_forward, layer)
        report.blocks += 1
    return report


def _allow_more() -> None:
    """Torch gives up on a function after eight compilations. Blocks that read others' keys and values, and that do not, rows
    of two lengths, learning and looking on, blocks that are frozen and blocks that are not: that is more, and each pays."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, MOST)


def as_written(model: nn.Module) -> None:
    """Let the blocks of a model run as they are again: what was compiled for training may fit nothing else."""
    for layer in layers_of(model):
        for name in ("_compiled", "_plain_forward", "forward"):
            layer.__dict__.pop(name, None)


@dataclass
class _Slot:
    """What a compiled block keeps: itself compiled, until that turns out to be impossible."""

    name: str
    call: Callable[..., Result] | None
    report: Compiled
    proven: bool = False

    def __deepcopy__(self, memo: Any) -> _Slot:
        return _Slot(self.name, self.call, self.report, self.proven)


class _Apart(Context):
    """A context of one block alone: whatever the number of its layer, keys and values are kept under the same name."""

    def append(self, layer: int, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> KVView:
        return super().append(0, k, v, rotate)

    def lent(self, layer: int, draw: Callable[[], int | None]) -> KVView | None:
        """What was drawn outside: inside, a number by chance would be another graph."""
        return self.views.get(LENT)


def _alone(kind: type) -> Callable[..., Result]:
    """The forward pass of a class of blocks as a function of tensors."""
    plain: Any = kind.forward  # type: ignore[attr-defined]

    def block(
        self: Any,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        causal: bool,
        labels: Tensor | None,
        lent: KVView | None,
    ) -> Result:
        context = _Apart(positions=positions, documents=documents, causal=causal, labels=labels)
        owner = _owner(self)
        if lent is not None:
            context.views[LENT if owner is None else owner] = lent
        y = plain(self, x, context)
        return y, None if owner is not None else context.views.get(0), context.collected

    # Torch counts compilations by code, and gives up after a few. Each model has its own count, so that a teacher's and those of
    # the step before take nothing away from a student's.
    block.__code__ = block.__code__.replace(co_name=f"{block.__code__.co_name}_{next(_models)}")
    return block


def _forward(self: Any, x: Tensor, context: Context) -> Tensor:
    slot: _Slot = self._compiled
    if slot.call is None or context.cache is not None:
        return _eager(self, x, context)
    if not slot.proven:
        _prepare(self, x.device)
    try:
        lent = _lent(self, context)
        step = (context.positions, context.documents, context.causal, context.labels)
        y, view, collected = slot.call(self, x, *step, lent)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Compilers fail in too many ways to name: on its first run any error counts as theirs. If the block itself is at
        # fault, running it as it is raises what is wrong. Later, errors may be signals (a recomputation that has enough).
        if slot.proven and not isinstance(error, _refusals()):
            raise
        out = _eager(self, x, context)
        slot.report.reasons[slot.name] = _reason(error)
        slot.report.blocks -= 1
        slot.call = None
        return out
    slot.proven = True
    if view is not None:
        context.views[self.config.layer] = view
    for name, values in collected.items():
        for value in values:
            context.collect(name, value)
    return y


def _prepare(self: nn.Module, device: torch.device) -> None:
    """Tables that are copied to a device when first asked for: inside a compiled block that would be another graph than the
    next one, and a recomputation would not match what it is to repeat."""
    for module in self.modules():
        tables: Any = getattr(getattr(module, "rotary", None), "frequencies", None)
        if tables is not None:
            tables(device)


def _refusals() -> tuple[type[Exception], ...]:
    """What torch raises when it cannot compile for new shapes, or would have to for too many."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _eager(self: Any, x: Tensor, context: Context) -> Tensor:
    out: Tensor = type(self).forward(self, x, context)
    return out


def _owner(layer: Any) -> int | None:
    """The layer whose keys and values a block reads, where they are not its own."""
    store = getattr(getattr(getattr(layer, "mixer", None), "config", None), "store", None)
    owner: int | None = getattr(store, "owner", None)
    return owner


def _lent(layer: Any, context: Context) -> KVView | None:
    """The keys and values that a block reads in this step, where they are not its own."""
    owner = _owner(layer)
    if owner is not None:
        return context.views[owner]
    mixer: Any = getattr(layer, "mixer", None)
    found: KVView | None = mixer.lent(context) if hasattr(mixer, "lent") else None
    return found


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
