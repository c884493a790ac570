"""What routers ask that look at whole rows before they choose."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair


def whole_rows(x: Tensor, context: Context | None, who: str) -> Tensor:
    """Which tokens of x [B, S, dim] are no padding, [B, S]. Where rows are not all there, or more than one, `who` is refused."""
    if x.dim() != 3:
        raise UnsupportedPair(f"{who} need rows of tokens, not shape {tuple(x.shape)}", hint="give [rows, tokens, dim]")
    if context is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if context.cache is not None:
        raise UnsupportedPair(
            f"{who} cannot write token by token: later tokens would change what became of earlier ones",
            hint="use the router TopK in models that generate text",
        )
    if context.documents is not None:
        raise UnsupportedPair(
            f"{who} would mix the documents of a row",
            hint="give every document a row of its own, or use the router TopK",
        )
    return context.positions >= 0
