"""One of two processes: optimisers on sharded parameters take the steps that they take on whole ones."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from orchard.train.clip import Clip
from orchard.train.optim import Adafactor, AdamW, AdamW8bit, Muon

SHAPES = {
    "up.weight": (12, 8),
    "wide.weight": (5, 16),
    "experts": (4, 6, 8),
    "norm.weight": (7,),
    "embedding.weight": (20, 8),
}
EVERY = {
    "adamw": (AdamW.Config(lr=1e-2), 1e-6),
    "muon": (Muon.Config(lr=1e-2), 1e-5),
    "adafactor": (Adafactor.Config(lr=1e-2), 1e-6),
    "8bit": (AdamW8bit.Config(lr=1e-2, smallest=64), 3e-3),  # blocks are those of the shard
}


def run(cfg: AdamW.Config, *, sharded: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    mesh, make = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)

    def place(x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Shard(0)]) if sharded else x

    parameters = {name: nn.Parameter(place(torch.randn(shape, generator=make))) for name, shape in SHAPES.items()}
    optimizer = cfg.build(named_parameters=parameters.items())
    clip, norms = Clip.Config(limit=5.0).build(), []
    for _ in range(4):
        for name, parameter in parameters.items():
            parameter.grad = place(torch.randn(SHAPES[name], generator=make))
        norms.append(clip(parameters.items()).value)
        optimizer.step()
    for state in optimizer.state.values():  # nothing may be left half added up: it would be stored so
        assert not any(
            placement.is_partial() for value in state.values() for placement in getattr(value, "placements", ())
        )
    whole = {name: p.full_tensor() if sharded else p for name, p in parameters.items()}  # type: ignore[attr-defined]
    return whole, norms


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, (cfg, tolerance) in EVERY.items():
        (one, norms), (two, others) = (run(cfg, sharded=sharded) for sharded in (False, True))  # type: ignore[arg-type]
        torch.testing.assert_close(norms, others, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        for key, value in one.items():
            torch.testing.assert_close(
                value, two[key], atol=tolerance, rtol=tolerance, msg=lambda m, name=name, key=key: f"{name} {key}: {m}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
