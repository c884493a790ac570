"""Values of learned weights, made once for a whole step instead of once for every micro-batch, recomputation and chunk of scores.

    with once(model):                                   # every `Learned` weight is a plain one inside, and every packed one
        for micro in batch:
            loss(model, micro).backward()
    optimizer.step()                                    # after it, never inside: weights must not change there

Inside, a module computes with one finished tensor, a parameter of its own called `made`, whose gradient adds up over all
micro-batches; it comes to the weight and its scales when the block is left, in one backward pass. Because it is linear in that
gradient, the result is what it would have been, but for rounding. Sums of several gradients are kept in float32 whatever the
tensor is. A compiled block sees nothing but a plain product, and the same objects in every step.

Packed weights, which nothing is learnt in, are made when they are first met and stay until `forget`: a block that has side paths
beside two bits here and four bits there is then one and the same to a compiler.

Without gradients (`torch.no_grad()`) it serves evaluation the same way. Checkpoints and averages belong outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats.base import Format, Packed, PackedPart
from orchard.nn.formats.learned import Learned, computed_in
from orchard.nn.formats.learned_recorded import Place, Record, Recorded, as_graph
from orchard.nn.formats.plain import Plain
from orchard.nn.linear import Embedding, Weight

NAME, KEPT, RECORDED = "made", "_made", "_recorded"


class Made(Format):
    """A weight whose values are there already, as the module's parameter `made`."""

    def __init__(self, form: Format, dtype: torch.dtype) -> None:
        self.form, self.dtype = form, dtype

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        return {NAME: PackedPart(shape, self.dtype, trained=True)}

    def pack(self, weight: Tensor) -> Packed:
        raise ConfigError("a weight is put in place inside `once`", hint="leave that block first")

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed[NAME].to(dtype)

    def matmul(self, x: Tensor, packed: Packed) -> Tensor:
        return functional.linear(x, packed[NAME].to(computed_in(x)))

    def fake(self, weight: Tensor) -> Tensor:
        return self.form.fake(weight)


@contextmanager
def once(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make the values of all weights of a model that are not plain now. `dtype`: what they are multiplied in (bfloat16 where
    autocast says so); None: float32. If the block ends with an error, these weights get no gradient and everything else is as
    it was."""
    found = [
        module for module in model.modules() if isinstance(module, Weight) and not isinstance(module.format, Plain)
    ]
    if any(isinstance(module.format, Made) for module in found):
        raise ConfigError("this model is inside `once` already", hint="use one block for a whole step")
    # A table is also looked up in, and what is looked up is added to without rounding.
    kinds = [torch.float32 if dtype is None or isinstance(module, Embedding) else dtype for module in found]
    if found and found[0]._first().is_cuda and not any(_sharded(module) for module in found):
        with _on_gpu(model, found, kinds):
            yield
        return
    kept: list[_Kept] = []
    try:
        for module, kind in zip(found, kinds, strict=True):
            kept.append(_Kept(module, kind))
        yield
        for one in kept:
            one.leave()
            one.pass_on()
    finally:
        for one in kept:
            one.leave()


@contextmanager
def _on_gpu(model: nn.Module, found: list[Any], kinds: list[torch.dtype], record: Record = as_graph) -> Iterator[None]:
    """The same by recorded passes over all learned weights. Packed ones are made one by one, when they are first met."""
    pairs = list(zip(found, kinds, strict=True))
    learned = [(module, kind) for module, kind in pairs if isinstance(module.format, Learned)]
    known: Recorded | None = model.__dict__.get(RECORDED)
    fits = known is not None and known.fits([module for module, _ in learned])
    if known is None or not fits or [place.made.dtype for place in known.places] != [kind for _, kind in learned]:
        if known is not None:
            known.close()
        places = []
        for module, kind in learned:
            made = nn.Parameter(torch.empty(module.shape, dtype=kind, device=module._first().device))
            places.append(Place(module, made, Made(module.format, kind)))
        known = Recorded(places, record)
        model.__dict__[RECORDED] = known
    learns, done = torch.is_grad_enabled(), False
    packed: list[_Kept] = []
    known.begin()
    try:
        for module, kind in pairs:
            if not isinstance(module.format, Learned):
                packed.append(_Kept(module, kind))
        for place in known.places:
            place.made.requires_grad_(learns and bool(place.trained))
            place.made.grad = None
            place.module._parameters[NAME], place.module.format = place.made, place.form
        yield
        done = True
    finally:
        for one in packed:
            one.leave()
        for place in known.places:
            place.module._parameters.pop(NAME, None)
            place.module.format = place.format
    if done and learns:
        known.end()


def _sharded(module: Weight) -> bool:
    return any(hasattr(part, "placements") for part in module.packed().values())


class _Kept:
    """One module's weight while its values are made."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.format = module, module.format
        self.total: Tensor | None = None
        self.scales: Tensor | None = None
        parts: Packed = module.packed()
        if _sharded(module):
            raise UnsupportedPair(
                "`once` and weights that live in shards", hint="train without shards, or without `once`"
            )
        self.trained = {name: part for name, part in parts.items() if part.requires_grad}
        learns = torch.is_grad_enabled() and bool(self.trained)
        # The same objects in every step: whoever compiled the module would compile it again for others.
        made, form = module.__dict__.get(KEPT, (None, None))
        device = next(iter(parts.values())).device
        known = made is not None and made.dtype == dtype and made.device == device and form.form is self.format
        self.learned = self.format if isinstance(self.format, Learned) else None
        if self.learned is not None or not known:
            with torch.no_grad():
                if self.learned is None:
                    values = self.format.unpack(parts, dtype)
                else:
                    self.scales = self.learned.scales(parts)
                    values = self.learned.values(parts, self.scales, dtype)
            if known:
                made.data = values
            else:
                made, form = nn.Parameter(values, requires_grad=learns), Made(self.format, dtype)
                module.__dict__[KEPT] = (made, form)
        made.requires_grad_(learns)
        made.grad = None
        self.made = made
        self.hook = made.register_post_accumulate_grad_hook(self._add) if learns and dtype != torch.float32 else None
        module._parameters[NAME] = made
        module.format = form

    def _add(self, made: Tensor) -> None:
        """Add a micro-batch's gradient to those before it, in float32."""
        assert made.grad is not None
        self.total = made.grad.float() if self.total is None else self.total.add_(made.grad)
        made.grad = None

    def leave(self) -> None:
        """Give the module its own format back."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self.module._parameters.pop(NAME, None)
        self.module.format = self.format

    def pass_on(self) -> None:
        """The gradient of the values becomes that of the weight and its scales."""
        total = self.made.grad if self.total is None else self.total
        self.made.grad = self.total = None
        if self.learned is None:
            return
        self.made.data = self.made.data.new_empty(0)
        if total is None:
            return
        assert self.scales is not None
        slopes = self.learned.slopes(self.module.packed(), self.scales, total)
        with torch.no_grad():
            for name, part in self.trained.items():
                part.grad = slopes[name] if part.grad is None else part.grad + slopes[name]


def forget(model: nn.Module) -> None:
    """Let go of what `once` keeps from step to step."""
    recorded: Recorded | None = model.__dict__.pop(RECORDED, None)
    if recorded is not None:
        recorded.close()
    for module in model.modules():
        module.__dict__.pop(KEPT, None)
