"""What rounding one weight really does: the model is run again from the layer that has it, and its answers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.nn.formats import Packed
from orchard.transforms.lora_twin import replaced, twin
from orchard.transforms.sensitivity_fisher import context_of, pieces

CHUNK = 256
"""Tokens whose scores are compared at a time."""


class Trial:
    """A model and what it gives on some texts, layer by layer. Texts are few: every measurement reads them again."""

    @torch.no_grad()
    def __init__(self, model: Any, texts: Sequence[Batch]) -> None:
        self.model = model
        self._batches = pieces(texts, model.device)
        self._states: list[list[Tensor]] = []
        self._contexts: list[Context] = []
        self._hidden: list[Tensor] = []
        for batch in self._batches:
            context, x = context_of(batch), model.embedding(batch.ids, model.dtype)
            states = []
            for layer in model.stack.layers:
                states.append(x)
                x = layer(x, context)
            self._states.append(states)
            self._contexts.append(context)
            self._hidden.append(model.norm(x)[batch.positions >= 0])

    @property
    def tokens(self) -> int:
        return sum(len(hidden) for hidden in self._hidden)

    @torch.no_grad()
    def divergence(self, path: str, format: BaseConfig, packed: Packed) -> float:
        """Nats per token between the model's answers and those of the model with this weight in another format."""
        other: Any = replaced(self.model, {path: lambda module: _kept(module, format, packed)})
        first = int(path.split(".")[2]) if path.startswith("stack.layers.") else 0
        if path == "head":
            first = len(self.model.stack.layers)
        total = 0.0
        for batch, states, context, hidden in zip(
            self._batches, self._states, self._contexts, self._hidden, strict=True
        ):
            if first < len(states):
                x = other.embedding(batch.ids, other.dtype) if path == "embedding" else states[first]
                run = replace(context, views=dict(context.views), collected={})
                for layer in other.stack.layers[first:]:
                    x = layer(x, run)
                mine = other.norm(x)[batch.positions >= 0]
            else:
                mine = hidden
            for one, two in zip(hidden.split(CHUNK), mine.split(CHUNK), strict=True):
                was = self.model.scores(one).float().log_softmax(-1)
                now = other.scores(two).float().log_softmax(-1)
                total += float((was.exp() * (was - now)).sum())
        return total / max(1, self.tokens)


def _kept(module: Any, format: BaseConfig, packed: Packed) -> Any:
    """A module again, with its weight in another format. The module itself is not changed."""
    made = twin(module)
    for name in module.packed():
        made._parameters.pop(name, None)
        made._buffers.pop(name, None)
    made.format, made.config = format.build(), module.config.clone(format=format)
    made._buffers.update({name: part.detach() for name, part in packed.items()})
    return made
