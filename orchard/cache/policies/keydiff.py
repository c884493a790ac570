"""Tokens whose keys are unlike the others' (KeyDiff, arXiv 2504.15364): no queries are needed.

The mean of all normalised keys of a head is its anchor; a token is worth the more, the smaller the cosine of its key with it.
Keys are compared as attention sees them, rotated to the places that they have now.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from orchard.cache.policies.head_slots import HeadSlots
from orchard.cache.policies.scored import Scored, ScoredConfig
from orchard.core.config import config


class KeyDiff(Scored):
    """Scores from keys alone."""

    @config
    class Config(ScoredConfig):
        pass

    def scores(self, slots: HeadSlots, keys: Callable[[], Tensor]) -> Tensor:
        held = (slots.positions[:, :, : slots.reach(None)] >= 0)[..., None]
        whole = functional.normalize(keys().float(), dim=-1)
        anchor = (whole * held).sum(2, keepdim=True) / held.sum(2, keepdim=True).clamp_min(1)
        return -functional.cosine_similarity(whole, anchor, dim=-1)
