"""Which experts an image really uses: counted where they run, and not where they are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.models.vision import ViT
from orchard.nn.moe import MoE
from orchard.nn.moe.experts import Experts


class Counting(Experts):
    """Experts that note how many of them got tokens, and run as they do otherwise."""

    def __init__(self, inner: Experts, noted: list[int]) -> None:
        self.inner, self.noted = inner, noted

    def run(self, tokens: Tensor, counts: Tensor, context: Context) -> Tensor:
        self.noted.append(int((counts > 0).sum()))
        return self.inner.run(tokens, counts, context)


@torch.no_grad()
def used(model: ViT, images: Tensor) -> list[list[int]]:
    """How many experts each image uses in each layer that has some; images go through one by one."""
    noted: list[int] = []
    mixtures = [block.mlp for block in model.stack.layers if isinstance(block.mlp, MoE)]
    for moe in mixtures:
        moe.experts = Counting(moe.experts, noted)
    for image in images:
        model(image[None])
    for moe in mixtures:
        moe.experts = None
    return [noted[at : at + len(mixtures)] for at in range(0, len(noted), len(mixtures))]
