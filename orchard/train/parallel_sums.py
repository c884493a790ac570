"""What the processes of a run know in common: sums, lists of what each has, and a check that all were told the same.

What is sent are tensors: notes go as JSON, never as pickled objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchard.core.config import Config
from orchard.core.digest import sha256
from orchard.core.errors import ConfigError
from orchard.train.parallel import Mesh
from orchard.train.parallel_tracks import in_tracks
from orchard.train.world import World


def total(value: Tensor, mesh: Mesh) -> Tensor:
    """The sum of a value over the processes that read different data. Floats are added up, and come back, in float64: a sum of
    losses over many processes then has the same digits in whatever order it was taken. Whole numbers stay what they are."""
    value = value.detach()
    wide = value.to(torch.float64 if value.is_floating_point() else torch.int64, copy=True)
    group = mesh.data_group
    if group is not None:
        dist.all_reduce(wide, group=group)
    return wide


def totals(values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, float]:
    """`total` of many scalars in one exchange, by name. All processes have to have the same names."""
    if not values:
        return {}
    together = torch.stack([value.detach().to(torch.float64).reshape(()) for value in values.values()])
    return dict(zip(values, total(together, mesh).tolist(), strict=True))


class OtherTracks:
    """What `Clip` asks about processes that have other tracks of the same model."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.dims is not None
        self._group = mesh.dims.get_group("track")
        self._first = mesh.dims.get_local_rank("track") == 0
        self._here = mesh.here

    def counts(self, name: str) -> bool:
        """Tracks are counted where they are, everything else, which all have, by the first."""
        return self._first or in_tracks(name)

    def added(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self._here.device)
        dist.all_reduce(found, group=self._group)
        return float(found)

    def joined(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for each in gathered(list(names), self._here) for name in each))


def anywhere(flag: bool, mesh: Mesh) -> bool:
    """Whether it is so on any process at all, those with the same data and other parts of the model included."""
    if mesh.here.size == 1:
        return flag
    found = torch.tensor(int(flag), device=mesh.here.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def gathered(note: Any, here: World) -> list[Any]:
    """What every process has, by rank, on every process: anything that JSON holds."""
    if here.size == 1:
        return [note]
    data = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8).to(here.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=here.device) for _ in range(here.size)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=here.device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=here.device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths)]


def same_everywhere(value: Any, here: World, *, what: str = "the config") -> None:
    """Refuse to go on where processes were given different configs (or anything else that JSON holds)."""
    plain = value.to_dict() if isinstance(value, Config) else value
    digest = sha256(json.dumps(plain, sort_keys=True, default=repr).encode()).hex()
    found = gathered(digest, here)
    other = [rank for rank, each in enumerate(found) if each != found[0]]
    if other:
        raise ConfigError(
            f"{what} of rank {', '.join(map(str, other))} is not that of rank 0",
            hint="start all processes with the same command, files and seed",
        )
