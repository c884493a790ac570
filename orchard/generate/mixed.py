"""A plan with steps in torch, run for one sequence: native stretches, and modules between them.

Such a step works on the rows that the native call before it left in a buffer. Then, and only then, torch and the model's modules
are needed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.ops.plan.steps import Torch

if TYPE_CHECKING:
    from orchard.generate.native import NativeRunner
    from orchard.ops.kernels.native.program import Stores


class Mixed:
    """One sequence; modules that keep something between tokens keep it here."""

    def __init__(self, runner: NativeRunner, length: int) -> None:
        self.program = runner.program
        self.decoder = runner.decoder
        self.cache = self.decoder.cache(batch=1, length=length)
        plan = runner.plan
        places = [place for place, step in enumerate(plan.steps) if isinstance(step, Torch)]
        self.torch_steps = [plan.steps[place] for place in places]
        self.stretches = [
            (before + 1, after) for before, after in pairwise([-1, *places, len(plan.steps)])
        ]  # the native steps before each torch step, and after the last

    def back(self, tokens: int) -> None:
        import torch

        with torch.inference_mode():
            self.cache.rewind(torch.tensor([tokens]))

    def run(
        self,
        stores: Stores,
        tokens: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        prompt: bool,
    ) -> None:
        """As `Program.run`. Tokens of an answer are taken one by one: what torch gives several may differ in the last bits."""
        width = len(tokens) if prompt else 1
        for at in range(0, len(tokens), width):
            part = slice(at, at + width)
            first, last = np.searchsorted(wanted, (at, at + width))
            some = wanted[first:last] - np.int32(at)
            with self.program.lock:
                self._run(stores, tokens[part], sequences[part], positions[part], some, scores[first:last], prompt)

    def _run(self, stores: Stores, *rows: Any) -> None:
        import torch

        from orchard.core.context import Context

        *given, prompt = rows
        tokens, _, positions, _, _ = given
        context = Context(positions=torch.from_numpy(positions.astype(np.int64))[None], cache=self.cache)
        for place, (first, last) in enumerate(self.stretches):
            if first < last or first == 0:
                self.program.run(stores, *given, first=first, last=last, prompt=prompt)
            if place < len(self.torch_steps):
                self._module(self.torch_steps[place], len(tokens), context)

    def _module(self, step: Any, rows: int, context: Any) -> None:
        import torch

        x = torch.from_numpy(self.program.buffer(step.src, rows).copy())[None]
        module = self.decoder.get_submodule(step.node)
        with torch.inference_mode():
            y = module(x) if _takes_one(module) else module(x, context)
        self.program.buffer(step.to, rows)[:] = y[0].float().numpy()


def _takes_one(module: Any) -> bool:
    """Whether a module is called as x → y rather than (x, context) → y."""
    import inspect

    return len(inspect.signature(module.forward).parameters) == 1
