"""What the blocks of two models give, side by side: a student that is near its teacher block by block has less to find out.

Scores say what is wrong at the end, after all blocks; what each block gives says where. For a student that is the teacher with
something changed inside (fewer bits, shared keys and values), block k of the one is to give what block k of the other gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.blocks import layers_of
from orchard.core.errors import UnsupportedPair


@contextmanager
def listening(model: Any) -> Iterator[list[Tensor]]:
    """What every block of a model gives, in their order, as far as the model is run inside."""
    heard: list[Tensor] = []
    blocks = layers_of(model) if isinstance(model, nn.Module) else []
    hooks = [block.register_forward_hook(lambda module, given, out: heard.append(out)) for block in blocks]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def distance(mine: Sequence[Tensor], theirs: Sequence[Tensor], real: Tensor) -> Tensor:
    """The mean over blocks of |student - teacher|² / |teacher|² at the places that are real [B, T]: 0 when all are alike, about 1
    where nothing is. Blocks that nothing is learnt in, and none before them, are left out."""
    if not theirs or len(mine) != len(theirs) or mine[0].shape != theirs[0].shape:
        raise UnsupportedPair(
            f"a student of {len(mine)} blocks cannot be held against a teacher of {len(theirs)}, block by block",
            hint="set states=0, or give a teacher with the same blocks",
        )
    count = real.sum().clamp_min(1)
    found = [
        (torch.where(real, _relative(one, other), 0).sum() / count)
        for one, other in zip(mine, theirs, strict=True)
        if one.requires_grad or not torch.is_grad_enabled()
    ]
    return torch.stack(found).mean() if found else torch.zeros((), device=real.device)


def _relative(one: Tensor, other: Tensor) -> Tensor:
    other = other.float()
    return (one.float() - other).square().sum(-1) / other.square().sum(-1).clamp_min(1e-12)
