"""What routers are trained with beside the model's own loss. Shapes: N tokens, E experts, K chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.nn.moe.router import Routing


def balance(routing: Routing, real: Tensor) -> Tensor:
    """The load-balance loss of Switch Transformers (arXiv 2101.03961): 1 when all experts share equally. `real` [N] is False for
    padding."""
    experts, k = routing.logits.shape[-1], routing.experts.shape[-1]
    share = real[:, None].float()
    total = share.sum().clamp_min(1)
    chosen = torch.zeros_like(routing.logits, dtype=torch.float32).scatter_add_(
        1, routing.experts, share.expand(-1, k).contiguous()
    )
    load = chosen.sum(0) / (total * k)
    importance = (routing.logits.float().softmax(-1) * share).sum(0) / total
    return experts * (load * importance).sum()


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    """The router z-loss (arXiv 2202.08906): the mean square of log Σ exp, which keeps scores small."""
    share = real.float()
    return (logits.float().logsumexp(-1).square() * share).sum() / share.sum().clamp_min(1)
