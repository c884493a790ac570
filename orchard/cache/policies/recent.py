"""The newest tokens, and the first few (StreamingLLM, arXiv 2309.17453), under a budget that is kept up block by block.

Unlike `Window`, which forgets token by token and leaves positions as they are, this one numbers what stays anew, as the paper
does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from orchard.cache.policies.head_slots import HeadSlots
from orchard.cache.policies.scored import Scored, ScoredConfig
from orchard.core.config import config


class Recent(Scored):
    """A token is worth more than every older one."""

    @config
    class Config(ScoredConfig):
        pass

    def scores(self, slots: HeadSlots, keys: Callable[[], Tensor]) -> Tensor:
        return slots.positions[:, :, : slots.reach(None)]
