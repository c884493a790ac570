"""How much the inputs of some modules usually say: mean magnitudes over batches of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.transforms.base import Tell, silent


@torch.no_grad()
def mean_inputs(
    model: nn.Module, paths: Sequence[str], texts: Sequence[Batch], tell: Tell = silent
) -> dict[str, Tensor]:
    """The mean of |x| over all real tokens, by channel, of what each of these modules reads. The model stays as it was."""
    if not len(texts):
        raise ConfigError("there are no texts to look at", hint="give some batches of the text the model is for")
    sums: dict[str, Tensor] = {}
    real: list[Tensor] = []

    def watch(path: str) -> Callable[..., None]:
        def look(module: nn.Module, given: tuple[Any, ...]) -> None:
            seen = given[0].detach().float().abs()[real[0]].sum(0)
            sums[path] = sums[path] + seen if path in sums else seen

        return look

    hooks = [model.get_submodule(path).register_forward_pre_hook(watch(path)) for path in paths]
    training, tokens = model.training, 0
    try:
        model.eval()
        for batch in texts:
            here = batch.to(next(model.parameters()).device)
            real[:] = [here.positions >= 0]
            tokens += int(real[0].sum())
            documents = None if here.plain else here.documents
            model.hidden(here.ids, Context(positions=here.positions, documents=documents, causal=here.plain))  # type: ignore[operator]
            tell(1 / len(texts))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not tokens:
        raise ConfigError("the texts hold no tokens", hint="give some batches of the text the model is for")
    return {path: total / tokens for path, total in sums.items()}
