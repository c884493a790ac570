"""How much a model's answers change when one weight is rounded, for all weights at once, by one pass forward and one back.

For a small change the divergence of the answers p from what they were is ½ E[dzᵀ F dz]: the square of the change dz of scores,
measured by F = diag(p) - p pᵀ. A random vector with covariance F at the scores, taken back through the model to what a linear map
gives (g), turns that into ½ E[(Σ g · Δx)²], where x is what goes into the map and Δ its rounding error. So no weight needs a
gradient of its own, and one pass serves every map and every format.

The sum over the tokens of a row inside the square is exact in the mean, and noisy by the number of rows: many short rows say more
than one long one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.nn.formats import Format, Packed
from orchard.nn.linear import GroupedLinear, Weight
from orchard.transforms.base import Tell, silent

ROWS_TOKENS = 1024
"""Tokens that go through the model at a time."""


class Rounded:
    """A weight as each of several formats would keep it."""

    def __init__(self, module: Weight, formats: Sequence[BaseConfig]) -> None:
        self.module = module
        dense = module.dense()
        self.formats: list[Format] = [format.build() for format in formats]
        self.packed: list[Packed] = [format.pack(dense) for format in self.formats]

    def errors(self, expert: int | None) -> list[Tensor]:
        """The rounding errors, float32 [out, in]."""
        dense = self.module.dense()
        off = [
            format.unpack(packed, torch.float32) - dense
            for format, packed in zip(self.formats, self.packed, strict=True)
        ]
        return off if expert is None else [one[expert] for one in off]


def context_of(batch: Batch) -> Context:
    documents = None if batch.plain else batch.documents
    return Context(positions=batch.positions, documents=documents, causal=batch.plain)


def pieces(texts: Sequence[Batch], device: torch.device, tokens: int = ROWS_TOKENS) -> list[Batch]:
    """The texts in pieces of whole rows."""
    cut = []
    for batch in texts:
        rows = max(1, tokens // max(1, batch.ids.shape[1]))
        cut += [batch.part(first, first + rows).to(device) for first in range(0, len(batch), rows)]
    return cut


def divergences(
    model: Any, texts: Sequence[Batch], rounded: Mapping[str, Rounded], *, seed: int = 0, tell: Tell = silent
) -> dict[str, list[float]]:
    """Nats per token, by path and format, to second order."""
    found = {path: [0.0] * len(weight.packed) for path, weight in rounded.items()}
    generator = torch.Generator().manual_seed(seed)
    tokens = 0

    def add(path: str, x: Tensor, slope: Tensor, expert: int | None) -> None:
        x, slope = x.float(), slope.float()
        for at, off in enumerate(rounded[path].errors(expert)):
            along = (functional.linear(x, off) * slope).sum(-1)  # [B, T], or [N] of an expert's tokens
            found[path][at] += 0.5 * float(along.sum(-1).square().sum())

    cut = pieces(texts, model.device)
    hooks = [_watch(rounded[path].module, path, add) for path in rounded if path != "embedding"]
    try:
        for batch in cut:
            tokens += int((batch.positions >= 0).sum())
            with torch.enable_grad():
                x = model.embedding(batch.ids, model.dtype).detach().requires_grad_()
                scores = model.scores(model.norm(model.stack(x, context_of(batch))))
            scores.backward(_like_answers(scores.detach(), batch.positions >= 0, generator))
            tell(1 / len(cut))
    finally:
        for hook in hooks:
            hook.remove()
    return {path: [value / max(1, tokens) for value in values] for path, values in found.items()}


def _like_answers(scores: Tensor, valid: Tensor, generator: torch.Generator) -> Tensor:
    """Random vectors with the covariance diag(p) - p pᵀ at every token, zero at padding."""
    chance = scores.float().softmax(-1)
    root = torch.randn(scores.shape, generator=generator).to(scores.device).mul_(chance.sqrt())
    slope = root.sub_(chance.mul_(root.sum(-1, keepdim=True)))
    return slope.mul_(valid[..., None]).to(scores.dtype)


def _watch(module: nn.Module, path: str, add: Any) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        x, expert = args[0].detach(), args[1] if isinstance(module, GroupedLinear) else None
        if out.requires_grad:
            out.register_hook(lambda slope: add(path, x, slope, expert))

    return module.register_forward_hook(after)
