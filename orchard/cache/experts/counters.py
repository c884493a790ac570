"""What a cache of units counts. The engine and the simulator fill in the same table."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Since the start, or since `reset`."""

    passes: int = 0
    hits: int = 0
    """Units that were resident when they were needed (among them `late` ones)."""
    late: int = 0
    """Hits whose read had begun but was still under way."""
    misses: int = 0
    collisions: int = 0
    """Misses of units that had been fetched for this very pass and were evicted before they were used."""
    prefetched: int = 0
    """Reads begun before anybody needed the unit."""
    wasted: int = 0
    """Prefetched units that were evicted without having been used."""
    evictions: int = 0
    substituted: int = 0
    skipped: int = 0
    reads: int = 0
    bytes: int = 0
    waited: float = 0.0
    """Seconds that compute stood still for reads."""

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    def to_dict(self) -> dict[str, float]:
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "hit_rate": self.hit_rate}

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)
