"""How much the loss cares for each single weight: the mean square of its gradient over the tokens of some texts.

y = W x gives dL/dW = gᵧ xᵀ at each token, so the mean of squares is a product of squares, E[gᵧ² (x²)ᵀ] (the diagonal of
the empirical Fisher matrix). No weight needs a gradient of its own: packed ones are measured too, and one pass serves
every map.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.batch import IGNORED, Batch
from orchard.nn.linear import Embedding, GroupedLinear, Weight
from orchard.transforms.sensitivity_fisher import context_of, pieces


def squared_gradients(model: Any, paths: Collection[str], texts: Sequence[Batch]) -> dict[str, Tensor]:
    """By path, float32 in the weight's shape, of the paths that were reached. Tables are looked up in and have none."""
    sums: dict[str, Tensor] = {}
    tokens = 0

    def watch(path: str, module: Weight) -> Any:
        def after(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            x, expert = args[0].detach(), args[1] if isinstance(module, GroupedLinear) else None
            if out.requires_grad:
                out.register_hook(lambda slope: add(path, module, x, slope, expert))

        return module.register_forward_hook(after)

    def add(path: str, module: Weight, x: Tensor, slope: Tensor, expert: int | None) -> None:
        squares = slope.flatten(0, -2).float().square().mT @ x.flatten(0, -2).float().square()
        if path not in sums:
            sums[path] = torch.zeros(module.shape, device=squares.device)
        (sums[path] if expert is None else sums[path][expert]).add_(squares)

    watched = {path: model.get_submodule(path) for path in paths}
    hooks = [watch(path, module) for path, module in watched.items() if not isinstance(module, Embedding)]
    training = model.training
    model.eval()
    try:
        for batch in pieces(texts, model.device):
            tokens += batch.tokens
            with torch.enable_grad():
                x = model.embedding(batch.ids, model.dtype).detach().requires_grad_()
                scores = model.scores(model.norm(model.stack(x, context_of(batch))))
                loss = functional.cross_entropy(
                    scores.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                torch.autograd.grad(loss, x)  # leaves no gradient behind in the model's own parameters
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {path: total / max(1, tokens) for path, total in sums.items()}
