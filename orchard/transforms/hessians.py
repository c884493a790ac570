"""What goes into the linear maps of a model on some texts, layer by layer, for methods that fit weights to it.

`Stream` holds the texts on their way: the states before the next layer. A layer is looked at, changed, and then passed (`go`), so
that what a layer is fitted to is what the layers before it, as they are kept, will give it. Of all inputs X of a map only
H = XᵀX / n is kept, for one stage at a time: the maps of a layer that read the same tensor (q, k and v) share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UsageError
from orchard.nn.linear import GroupedLinear, Weight
from orchard.transforms.ptq import NotFinite

PIECE = 4096
"""Rows of inputs that are multiplied at a time."""
Look = Callable[[str, Tensor, int | None], None]
"""`(path, rows [N, in], expert)`"""


class Inputs:
    """The mean of x xᵀ over the rows x that went into a map, and how many there were."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.count = 0
        self._sum = torch.zeros(width, width, device=device)

    def add(self, rows: Tensor) -> None:
        for piece in rows.float().split(PIECE):
            self._sum.addmm_(piece.mT, piece)
        self.count += len(rows)

    def hessian(self, path: str) -> Tensor:
        """[in, in], float32."""
        if not self._sum.isfinite().all():
            raise NotFinite(f"{path} is given inputs that are not finite", hint="look at the layers before it")
        return self._sum / max(1, self.count)


class _Enough(Exception):
    """Everything that was to be seen of a layer has been seen."""


class Stream:
    """Texts on their way through a model. `model` is a decoder: an embedding, layers, a norm, perhaps a head."""

    @torch.no_grad()
    def __init__(self, model: Any, texts: Sequence[Batch], who: str) -> None:
        if not texts or not sum(len(batch) for batch in texts):
            raise UsageError(f"{who} looks at texts, and there are none", hint="give it some thousand tokens")
        if not hasattr(model, "stack") or not hasattr(model, "embedding"):
            raise ConfigError(f"{type(model).__name__} has no stack of layers", hint="give it a decoder")
        self.model = model
        batches = [batch.to(model.device) for batch in texts]
        self.states: list[Tensor] = [model.embedding(batch.ids, model.dtype) for batch in batches]
        self.contexts = [
            Context(positions=batch.positions, documents=None if batch.plain else batch.documents, causal=batch.plain)
            for batch in batches
        ]
        self.shared = {_owner(layer) for layer in model.stack.layers} - {None}
        """Layers whose keys and values others read."""

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(int((context.positions >= 0).sum()) for context in self.contexts)

    def stages(self, layer: nn.Module, modules: Mapping[str, nn.Module]) -> list[list[str]]:
        """The paths of the maps in the order they are called, those that read the same tensor together."""
        seen: list[tuple[Tensor, list[str]]] = []

        def look(path: str, x: Tensor, expert: int | None) -> None:
            if any(path in paths for _, paths in seen):
                return
            if seen and seen[-1][0] is x:
                seen[-1][1].append(path)
            else:
                seen.append((x, [path]))

        with _watched(modules, look):
            self._run(layer, 0)
        return [paths for _, paths in seen]

    def inputs(self, layer: nn.Module, modules: Mapping[str, Weight]) -> dict[str, list[Inputs]]:
        """What goes into maps that read the same tensor: one entry a map, one `Inputs` for each expert it has. Maps without
        experts share theirs."""
        first = next(iter(modules))
        experts = {path: module for path, module in modules.items() if isinstance(module, GroupedLinear)}
        made: dict[str, list[Inputs]] = {}
        for path, module in modules.items():
            count = module.shape[0] if isinstance(module, GroupedLinear) else 1
            made[path] = (
                [Inputs(module.shape[-1], self.model.device) for _ in range(count)] if path == first else made[first]
            )
        last = None if experts else list(modules)[-1]

        def look(path: str, rows: Tensor, expert: int | None) -> None:
            if path == first:
                made[path][expert or 0].add(rows)
            if path == last:
                raise _Enough

        self.watch(layer, modules, look)
        return made

    def watch(self, layer: nn.Module, modules: Mapping[str, nn.Module], look: Look) -> None:
        """Run a layer on all texts as they are now; `look` sees what goes into each of the modules, without padding."""
        for number, context in enumerate(self.contexts):
            valid = None if context.causal else context.positions >= 0

            def real(path: str, x: Tensor, expert: int | None, valid: Tensor | None = valid) -> None:
                rows = x[valid] if valid is not None and x.dim() == 3 else x.flatten(0, -2)
                look(path, rows, expert)

            with _watched(modules, real):
                self._run(layer, number)

    @torch.no_grad()
    def go(self, layer: nn.Module) -> None:
        """Pass a layer."""
        for number, context in enumerate(self.contexts):
            with _at_rest(layer):
                self.states[number] = layer(self.states[number], context)
            for kept in set(context.views) - self.shared:
                del context.views[kept]

    @torch.no_grad()
    def _run(self, layer: nn.Module, number: int) -> None:
        with suppress(_Enough), _at_rest(layer):
            layer(self.states[number], self.contexts[number])


def dead_inputs(hessian: Tensor) -> int:
    """Channels that were zero in every text."""
    return int((hessian.diagonal() == 0).sum())


@contextmanager
def _at_rest(layer: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(training)


@contextmanager
def _watched(modules: Mapping[str, nn.Module], look: Look) -> Iterator[None]:
    handles = []
    for path, module in modules.items():

        def before(module: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
            look(path, args[0], args[1] if len(args) > 1 else None)

        handles.append(module.register_forward_pre_hook(before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _owner(layer: Any) -> int | None:
    """The layer whose keys and values this one reads."""
    store = getattr(getattr(getattr(layer, "mixer", None), "config", None), "store", None)
    owner: int | None = getattr(store, "owner", None)
    return owner


def under(prefix: str, paths: Iterable[str]) -> list[str]:
    """Those of the paths that lie below another."""
    return [path for path in paths if path.startswith(f"{prefix}.")]
