"""`once` on a GPU: a model has hundreds of learned weights, each takes a dozen small calls, and the GPU would wait for them.

Here values, their gradients and what comes of those stay at the same places in memory from step to step, so both passes over all
weights (values before a step, gradients of weights and scales after it) are recorded when they are first made, and afterwards
asked for by one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchard.nn.formats.base import Packed
from orchard.nn.formats.learned import Learned

Run = Callable[[], None]
Record = Callable[[Run], Run]
WARM = 2
"""Runs before one is recorded: kernels are built then."""


class Place:
    """One learned weight: its values, the sum of their gradients, and the gradients of its parts."""

    def __init__(self, module: Any, made: nn.Parameter, form: Any) -> None:
        self.module, self.format, self.made, self.form = module, module.format, made, form
        self.parts: Packed = module.packed()
        self.trained = [name for name, part in self.parts.items() if part.requires_grad]
        self.scales: Tensor | None = None
        self.slopes: Packed = {}
        self.asked = False
        """Whether a gradient came in this step."""
        self.total = torch.zeros_like(made, dtype=torch.float32) if self.trained else None
        self.hook = made.register_post_accumulate_grad_hook(self._add) if self.trained else None

    def _add(self, made: Tensor) -> None:
        """Add a micro-batch's gradient to those before it, in float32."""
        assert made.grad is not None and self.total is not None
        self.total.add_(made.grad) if self.asked else self.total.copy_(made.grad)
        self.asked, made.grad = True, None

    def fits(self, parts: Packed) -> bool:
        """Whether the weight lies where it did, and the same is trained."""
        return all(
            part.data_ptr() == self.parts[name].data_ptr() and part.requires_grad == (name in self.trained)
            for name, part in parts.items()
        )


class Recorded:
    """All learned weights of a model. `begin` and `end` go around a step."""

    def __init__(self, places: Sequence[Place], record: Record) -> None:
        self.places = list(places)
        self.learning = [place for place in places if place.trained]
        self._record = record
        # A model with packed weights alone has nothing to record, and a graph of nothing is no graph.
        self._make: Run = record(self._values) if self.places else self._values
        self._pass_on: Run | None = None

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model has weights of its own, and records them itself."""

    def fits(self, modules: Sequence[Any]) -> bool:
        """Whether these are the modules, and everything lies where it did."""
        if len(modules) != len(self.places):
            return False
        pairs = zip(modules, self.places, strict=True)
        return all(module is place.module and place.fits(module.packed()) for module, place in pairs)

    def begin(self) -> None:
        self._make()
        for place in self.learning:
            place.asked = False

    def end(self) -> None:
        """The gradients of the values become those of weights and scales."""
        if not any(place.asked for place in self.learning):
            return
        if self._pass_on is None:
            self._pass_on = self._record(self._slopes)
        self._pass_on()
        with torch.no_grad():
            for place in self.learning:
                for name in place.trained if place.asked else ():
                    part, slope = place.parts[name], place.slopes[name]
                    part.grad = slope if part.grad is None else part.grad + slope

    def close(self) -> None:
        for place in self.places:
            if place.hook is not None:
                place.hook.remove()

    @torch.no_grad()
    def _values(self) -> None:
        for place in self.places:
            form: Learned = place.format
            place.scales = form.scales(place.parts)
            place.made.data.copy_(form.values(place.parts, place.scales, place.made.dtype))

    @torch.no_grad()
    def _slopes(self) -> None:
        for place in self.learning:
            assert place.scales is not None and place.total is not None
            place.slopes = place.format.slopes(place.parts, place.scales, place.total)


def as_graph(run: Run) -> Run:
    """A run of kernels that always reads and writes the same places, as one call. Recording runs nothing: what it writes is there
    after the first call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Another thread may be writing a checkpoint.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    replay: Run = graph.replay
    return replay
