"""Tokens that something looks at which is not kept itself: a repeated block (KVzip, arXiv 2505.23416), the words of a topic
(EpiCache, arXiv 2509.17396), or the question.

After each block whoever runs the model sends such tokens with `Context.probe`. They see all that is kept and each other; a kept
token is worth the largest share of attention that any of them gives it, in any query head of its group. Several probes add up to
the largest of all. Tokens that came after the last probe have not been looked at, and stay before all others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchard.cache.policies.attention import shares
from orchard.cache.policies.base import Placement
from orchard.cache.policies.head_slots import HeadSlots
from orchard.cache.policies.scored import Scored, ScoredConfig
from orchard.core.config import config
from orchard.core.context import Watch
from orchard.core.errors import UsageError


class Probe(Scored):
    """Scores come from outside: room is made by whoever probes."""

    by_itself = False

    @config
    class Config(ScoredConfig):
        pass

    def watch(self, slots: HeadSlots, placement: Placement, positions: Tensor, keys: Tensor) -> Watch | None:
        if placement.writes or torch.compiler.is_compiling():
            return None

        def note(q: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> None:
            real = positions[:, :, positions.shape[2] - q.shape[2] :] >= 0  # a layer may be given the last tokens only
            found = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
            for share, part in shares(q, keys, mask, scale, softcap):
                share = share.masked_fill(~real[:, :, None, part, None], 0.0)
                found = torch.maximum(found, share.amax((2, 3)))
            _remember(slots, found[:, :, : placement.upto])

        return note

    def scores(self, slots: HeadSlots, keys: Callable[[], Tensor]) -> Tensor:
        if slots.scores is None:
            raise UsageError("nothing has looked at what is kept", hint="probe before evicting")
        unseen = slots.reach(None) - slots.scores.shape[2]
        return torch.nn.functional.pad(slots.scores, (0, unseen), value=float("inf"))


def _remember(slots: HeadSlots, found: Tensor) -> None:
    """The largest of what was seen before and what is seen now."""
    before = slots.scores
    if before is not None:
        old = torch.nn.functional.pad(before, (0, found.shape[2] - before.shape[2]))
        found = torch.maximum(old, found)
    slots.scores = found
