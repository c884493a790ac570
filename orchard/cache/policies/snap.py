"""Tokens that the last ones read look at (SnapKV, arXiv 2404.14469).

The queries of the last `last` tokens are remembered. When room is needed their attention to all that is kept is summed, in every
query head of a group, and smoothed over neighbours; those last tokens stay themselves, as far as they take half of the budget
or less.

What differs from the paper: it compresses a prompt once, at its end; here the same happens whenever a block would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from orchard.cache.policies.attention import shares
from orchard.cache.policies.base import Placement
from orchard.cache.policies.head_slots import NEVER, HeadSlots
from orchard.cache.policies.scored import Scored, ScoredConfig
from orchard.core.config import config
from orchard.core.context import Watch
from orchard.core.errors import ConfigError


@dataclass(frozen=True)
class Seen:
    """Queries [B, Hq, T, D] of a layer, where they stand [B, T], and the first position that each could see [B, 1|H, T]."""

    q: Tensor
    positions: Tensor
    first: Tensor
    scale: float
    softcap: float | None

    def keep(self, rows: Tensor) -> Seen:
        q, positions, first = (part.index_select(0, rows) for part in (self.q, self.positions, self.first))
        return replace(self, q=q, positions=positions, first=first)

    def last(self, tokens: int) -> Seen:
        return replace(
            self, q=self.q[:, :, -tokens:], positions=self.positions[:, -tokens:], first=self.first[:, :, -tokens:]
        )


class Snap(Scored):
    """Scores from the last queries. Steps that are compiled are not watched."""

    @config
    class Config(ScoredConfig):
        last: int = 64
        pool: int = 5
        """Neighbours over which scores are averaged; 1: none."""

    def __init__(self, cfg: Config) -> None:
        if cfg.last < 1 or cfg.pool < 1 or cfg.pool % 2 == 0:
            raise ConfigError(
                f"the last {cfg.last} queries over {cfg.pool} neighbours", hint="use last ≥ 1, an odd pool"
            )
        self.last, self.pool = cfg.last, cfg.pool
        super().__init__(cfg)

    def newest(self, budget: int) -> int:
        if self.config.newest is not None:
            return self.config.newest
        return max(0, min(self.last, (budget - self.sinks) // 2))

    def watch(self, slots: HeadSlots, placement: Placement, positions: Tensor, keys: Tensor) -> Watch | None:
        if not placement.writes or torch.compiler.is_compiling():
            return None
        step: list[Seen] = []
        slots.queries.append(step)
        behind = positions.shape[2]
        for place in range(len(slots.queries) - 2, -1, -1):
            if behind >= self.last:
                del slots.queries[: place + 1]
                break
            behind += slots.queries[place][0].positions.shape[1] if slots.queries[place] else 0

        def note(q: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> None:
            places = placement.positions[:, :, None, :]
            seen = placement.valid[:, :, None, :] if mask is None else mask
            first = torch.where(seen, places, NEVER).amin(-1)
            queries = positions[:, 0, positions.shape[2] - q.shape[2] :]  # a layer may be given the last tokens only
            step.append(Seen(q, queries, first, scale, softcap).last(self.last))

        return note

    def scores(self, slots: HeadSlots, keys: Callable[[], Tensor]) -> Tensor:
        whole = keys()
        held = slots.positions[:, :, : slots.reach(None)]
        found = whole.new_zeros(whole.shape[:3], dtype=torch.float32)
        left = self.last
        for step in reversed(slots.queries):
            for seen in (one.last(left) for one in step):
                query, place = seen.positions[:, None, :, None], held[:, :, None, :]
                mask = (place >= seen.first[..., None]) & (place <= query) & (place >= 0)
                for share, part in shares(seen.q, whole, mask, seen.scale, seen.softcap):
                    real = (seen.positions >= 0)[:, None, None, part, None]
                    found += (share * real).sum(3).mean(2)
            left -= step[0].positions.shape[1] if step else 0
            if left <= 0:
                break
        return functional.avg_pool1d(found, self.pool, stride=1, padding=self.pool // 2, count_include_pad=False)
