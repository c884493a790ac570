"""How a run is cut over processes: a mesh with named dimensions, and a model spread over it in place.

Data parallelism is FSDP2 in every case (`fully_shard`; the ideas are those of arXiv 1910.02054 and 2304.11277). With `shard` each
process keeps its share of every parameter, gradient and optimiser state; without, the shards are of one process each, and
gradients are exchanged by the same code. Gradients are SUMS over processes and never means: what a step is divided by is the
total weight of its losses, which the loop knows.

Names of parameters stay what they were, and all of them become DTensors on the same mesh (of their stage, where there is a
pipeline, and of their tracks), so that optimisers, norms and checkpoints need to know nothing of how they are cut.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.train.parallel_experts import split_experts
from orchard.train.parallel_shards import shard
from orchard.train.parallel_stages import keep_stage, plan_stages
from orchard.train.parallel_tensor import split_tensors
from orchard.train.parallel_tracks import split_tracks
from orchard.train.world import World

SCHEDULES = ("1f1b", "gpipe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Mesh(Configurable):
    """The processes as a grid. `dims` is torch's mesh with dimensions (pipeline,) data, (solo,) and tensor, expert or track;
    None: one process."""

    @config
    class Config(BaseConfig):
        data: int = -1
        """Processes that read different data; -1: as many as the other dimensions leave."""
        tensor: int = 1
        """Processes that compute each layer together, on the same data."""
        expert: int = 1
        """Processes that hold different experts of every mixture, and read the same data."""
        track: int = 1
        """Processes that have different tracks of every layer of tracks, on the same data: see parallel_tracks.py."""
        pipeline: int = 1
        """Processes (or groups of them) that have different layers, on the same data: see parallel_pipeline.py."""
        cuts: list[int] | None = None
        """The first layer of each stage of the pipeline but the first; None: stages of about the same size."""
        schedule: str = "1f1b"
        """In which order a stage works: "1f1b", or "gpipe", which holds more in memory."""
        shard: bool = True
        """Keep parameters, gradients and optimiser states in shards over `data`; False: all of them on every process."""

        def wire(self) -> None:
            for name in ("tensor", "expert", "track", "pipeline"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"mesh.{name} is {getattr(self, name)}", hint="use a whole number from 1")
            if self.data < 1 and self.data != -1:
                raise ConfigError(f"mesh.data is {self.data}", hint="use a whole number from 1, or -1 for the rest")
            if self.schedule not in SCHEDULES:
                raise ConfigError(f"mesh.schedule is {self.schedule!r}", hint="use one of " + ", ".join(SCHEDULES))
            if self.pipeline == 1 and self.cuts:
                raise ConfigError(f"mesh.cuts is {self.cuts}, and mesh.pipeline is 1", hint="set mesh.pipeline too")
            if self.pipeline > 1 and self.expert > 1:
                raise UnsupportedPair(
                    f"mesh.pipeline {self.pipeline} with mesh.expert {self.expert}",
                    hint="use mesh.tensor, which also cuts experts, or one of the two alone",
                )
            if self.tensor > 1 and self.expert > 1:
                raise UnsupportedPair(
                    f"mesh.tensor {self.tensor} with mesh.expert {self.expert}",
                    hint="use one of them; tensor also cuts experts, each of them",
                )
            for name in ("tensor", "expert", "pipeline"):
                if self.track > 1 and getattr(self, name) > 1:
                    raise UnsupportedPair(
                        f"mesh.track {self.track} with mesh.{name} {getattr(self, name)}",
                        hint="use mesh.track with mesh.data alone",
                    )

    def __init__(self, cfg: Config, *, here: World) -> None:
        self.config = cfg
        self.here = here
        other = cfg.tensor * cfg.expert * cfg.track
        rest = other * cfg.pipeline
        data = here.size // rest if cfg.data == -1 else cfg.data
        if data * rest != here.size or data < 1:
            asked = "the rest" if cfg.data == -1 else cfg.data
            stages = f" x track {cfg.track}" if cfg.track > 1 else ""
            stages += f" x pipeline {cfg.pipeline}" if cfg.pipeline > 1 else ""
            raise ConfigError(
                f"a mesh of data {asked} x tensor {cfg.tensor} x expert {cfg.expert}{stages} for {here.size} processes "
                f"(it would need {max(data, 1) * rest})",
                hint="their product has to be the number of processes; data=-1 takes what the others leave",
            )
        self.data = data
        self.stages = cfg.pipeline
        self.other = "expert" if cfg.expert > 1 else "track" if cfg.track > 1 else "tensor"
        """The dimension whose processes read the same data."""
        self.dims: DeviceMesh | None = None
        if here.size > 1:
            sizes = {"pipeline": cfg.pipeline, "data": data, "solo": 1, self.other: other}
            if cfg.pipeline == 1:
                del sizes["pipeline"]
            if cfg.shard:
                del sizes["solo"]
            self.dims = init_device_mesh(here.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            if other > 1:  # norms are then added up over all processes of a stage at once
                within = tuple(name for name in sizes if name != "pipeline")
                self.dims[within]._flatten("all")

    @property
    def stage(self) -> int:
        """Which stage of the pipeline this process belongs to, of `stages` in all."""
        return 0 if self.dims is None or self.stages == 1 else self.dims.get_local_rank("pipeline")

    @property
    def data_rank(self) -> int:
        """Which share of the data this process reads: the source's number, of `data` in all."""
        return 0 if self.dims is None else self.dims.get_local_rank("data")

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        return None if self.dims is None else self.dims.get_group("data")


class Spread(Configurable):
    """The settings of `spread`."""

    @config
    class Config(BaseConfig):
        compute: str | None = None
        """What layers compute in under data parallelism ("bfloat16"), while parameters stay as they are; None: as they are."""
        reduce: str | None = "float32"
        """What gradients are added up in; None: as they come."""
        keep: bool = False
        """Keep the layers' whole parameters from the forward to the backward pass: less is sent, more memory is used."""
        check: bool = True
        """See that all processes begin with the same weights."""

        def wire(self) -> None:
            for name in ("compute", "reduce"):
                value = getattr(self, name)
                if value is not None and value not in DTYPES:
                    raise ConfigError(f"spread.{name} is {value!r}", hint="use one of " + ", ".join(DTYPES))

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


def spread(model: nn.Module, mesh: Mesh, cfg: Spread.Config | None = None) -> nn.Module:
    """Cut a model over the mesh, in place; the same model comes back. Recomputation and compilation go before this, the
    optimiser after it. On one process nothing is done."""
    cfg = (cfg or Spread.Config()).complete()
    if mesh.dims is None:
        return model
    stages = plan_stages(model, mesh.stages, mesh.config.cuts) if mesh.stages > 1 else []
    if cfg.check:
        _check_same(model, mesh.dims)
    together = mesh.dims[mesh.other].size() > 1
    if together:
        cut = {"expert": split_experts, "track": split_tracks, "tensor": split_tensors}[mesh.other]
        cut(model, mesh.dims[mesh.other])
    compute = None if cfg.compute is None else DTYPES[cfg.compute]
    if mesh.other == "track" and mesh.data == 1 and compute is None:
        return model  # no other process has anything of these tracks
    if stages:
        keep_stage(model, stages, mesh.stage, dtype=compute)
        if mesh.data == 1 and not together and compute is None:
            return model  # no other process has anything of this stage
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=None if cfg.reduce is None else DTYPES[cfg.reduce],
        cast_forward_inputs=False,  # a model embeds in the dtype of its parameters: nothing is left to cast
    )
    over = mesh.dims["data"] if mesh.config.shard else mesh.dims["data", "solo"]
    shard(model, over, policy, keep=cfg.keep or not mesh.config.shard)
    return model


def _check_same(model: nn.Module, dims: DeviceMesh) -> None:
    """All processes cut their own copy, so the copies have to be equal: two sums of every parameter tell."""
    named = list(model.named_parameters())
    if any(parameter.is_meta for _, parameter in named):
        raise ConfigError("a model without weights (meta) was to be spread", hint="fill it on every process first")
    sums = torch.stack(
        [torch.stack([p.detach().double().sum(), p.detach().double().square().sum()]) for _, p in named]
    ).to(dims.device_type)
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    differs = ((low != high) & ~(sums.isnan())).any(-1).nonzero().flatten().tolist()
    if differs:
        raise ConfigError(
            f"the processes begin with different weights: {named[differs[0]][0]} (and {len(differs) - 1} more)",
            hint="build the model from the same seed, or load the same file, on every process",
        )
