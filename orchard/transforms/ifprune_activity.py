"""A sub-network for a prompt without training: the hidden units that the prompt itself uses most.

The whole model reads the prompt once. A unit is worth how much of each token's activation it carries, over all tokens (GRIFFIN,
arXiv 2404.01365, which found that units active in a prompt stay so in its answer), times the length of the weights that read it.
Groups of units are worth the sum of their squares. No training: any decoder with gated MLPs will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.nn.mlp import GatedMLP
from orchard.nn.tensors import dense_tensor
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.prune_scores import a_share


class Activity:
    """Chooses by what a prompt makes of a decoder's units. `size`: units of a group; `keep`: the share of groups that stay."""

    def __init__(self, decoder: nn.Module, *, size: int, keep: float = 0.5) -> None:
        a_share("keep", keep)
        self.decoder: Any = decoder
        self.paths = [path for path, part in decoder.named_modules() if isinstance(part, GatedMLP)]
        if not self.paths:
            raise UnsupportedPair("the model has no gated MLP whose units can be chosen", hint="mixtures choose experts")
        widths = {decoder.get_submodule(path).config.hidden_dim for path in self.paths}  # type: ignore[union-attr]
        if len(widths) > 1 or (width := widths.pop()) % size:
            raise UnsupportedPair(f"MLPs of {sorted(widths) or width} units in groups of {size}", hint="use a divisor")
        self.size = size
        self.groups = width // size
        self.budget = max(1, round(keep * self.groups))
        self._lengths = [self._reads(path) for path in self.paths]

    def choose(self, ids: Sequence[int], budget: int | None = None) -> Choice:
        """The choice for one prompt."""
        if not len(ids):
            raise UsageError("a prompt without tokens chooses nothing", hint="give at least one token")
        worth = torch.stack(self._worth(torch.as_tensor(ids).reshape(1, -1)))
        return Choice(worth, self.budget if budget is None else budget)

    def _reads(self, path: str) -> Tensor:
        mlp: Any = self.decoder.get_submodule(path)
        return dense_tensor(mlp.down, "weight").detach().float().norm(dim=0)

    @torch.inference_mode()
    def _worth(self, ids: Tensor) -> list[Tensor]:
        seen: dict[str, Tensor] = {}

        def watch(path: str, lengths: Tensor) -> Callable[..., None]:
            def look(module: nn.Module, given: tuple[Any, ...]) -> None:
                active = given[0][0].float() * lengths
                share = active / active.norm(dim=-1, keepdim=True).clamp_min(1e-12)
                seen[path] = share.square().sum(0).unflatten(0, (-1, self.size)).sum(-1).cpu()

            return look

        ids = ids.to(self.decoder.device)
        hooks = [
            self.decoder.get_submodule(f"{path}.down").register_forward_pre_hook(watch(path, lengths.to(ids.device)))
            for path, lengths in zip(self.paths, self._lengths, strict=True)
        ]
        try:
            self.decoder.hidden(ids, Context.whole(ids))
        finally:
            for hook in hooks:
                hook.remove()
        return [seen[path].clone() for path in self.paths]
