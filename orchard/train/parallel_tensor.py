"""Tensor parallelism (arXiv 1909.08053) by the names of the tree: each process computes some heads and some hidden channels.

| part | names | cut |
|---|---|---|
| into heads or hidden channels | q k v gate up | by output; what comes out stays cut |
| back out of them | o down | by input; what comes out is added up over processes |
| an untied head | head | by vocabulary; scores are put together again, because objectives read whole rows (argmax, top-k) |
| everything else | norms, embeddings, routers | not cut: small, or looked up by row from the table that a tied head also reads |

Experts of a mixture are cut like any gate, up and down, each of them. Side paths (`lora_a`, `lora_b`) are cut with their map.
Parameters become DTensors. Modules get and give plain tensors: hooks wrap them on the way in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from orchard.core.errors import ConfigError, UnsupportedPair

COLUMN = frozenset({"q", "k", "v", "gate", "up"})
ROW = frozenset({"o", "down"})
HEAD_NORMS = frozenset({"q_norm", "k_norm"})
HEADS_AT = 2
"""Where heads are in [B, T, heads, D], which norms of single heads see."""


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model over one dimension of processes, in place. Everything is looked at before anything is changed."""
    parts = {path: _way(path, model) for path, module in model.named_modules() if holds(module)}
    for path, module in model.named_modules():
        _refuse(path, module, mesh.size(), parts.get(path))
    refuse_shared(model)
    for path, way in parts.items():
        part: Any = model.get_submodule(path)
        if way == "head" and part.weight.shape[0] % mesh.size():
            way = "whole"
        _WAYS[way](part, mesh)
    for mixer in model.modules():
        cfg: Any = getattr(mixer, "config", None)
        if hasattr(cfg, "kv_heads") and hasattr(mixer, "q"):
            mine = cfg.clone()
            mine.heads, mine.kv_heads = cfg.heads // mesh.size(), cfg.kv_heads // mesh.size()
            mixer.config = mine


def holds(module: nn.Module) -> bool:
    """Whether a module has parameters of its own."""
    return next(module.parameters(recurse=False), None) is not None


def whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """The same parameters on every process; what goes in is the same everywhere, and so is what comes out."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        place(module, name, parameter, mesh, Replicate())
    around(module, mesh, Replicate(), Replicate())


def place(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, how: Placement) -> None:
    """Each process has the whole tensor and keeps its share: nothing is sent."""
    cut = distribute_tensor(parameter.detach(), mesh, [how], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def around(module: nn.Module, mesh: DeviceMesh, into: Placement, out: Placement) -> None:
    """Show a module DTensors and everybody else plain tensors, in its forward pass and in `scores` where it has that."""

    def wrapped(value: Any) -> Any:
        return DTensor.from_local(value, mesh, [into], run_check=False) if isinstance(value, Tensor) else value

    def plain(value: Any) -> Any:
        return value.redistribute(placements=[out]).to_local() if isinstance(value, DTensor) else value

    module.register_forward_pre_hook(lambda _, args: tuple(wrapped(value) for value in args))
    module.register_forward_hook(lambda _, args, result: plain(result))
    scores: Any = getattr(module, "scores", None)
    if scores is not None:

        @wraps(scores)
        def shown(x: Tensor) -> Any:
            return plain(scores(wrapped(x)))

        module.scores = shown  # type: ignore[assignment]


# The ways -----------------------------------------------------------------------------------------------------------------


def _column(module: nn.Module, mesh: DeviceMesh, out: Placement | None = None) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        at = 0 if parameter.dim() == 1 else parameter.dim() - 2
        place(module, name, parameter, mesh, Replicate() if name == "lora_a" else Shard(at))
    around(module, mesh, Replicate(), out or Shard(-1))


def _row(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = parameter.dim() > 1 and name != "lora_b"
        place(module, name, parameter, mesh, Shard(parameter.dim() - 1) if cut else Replicate())
    around(module, mesh, Shard(-1), Replicate())


def _head(module: nn.Module, mesh: DeviceMesh) -> None:
    _column(module, mesh, out=Replicate())


def _of_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        place(module, name, parameter, mesh, Replicate())
    around(module, mesh, Shard(HEADS_AT), Shard(HEADS_AT))


_WAYS: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "column": _column,
    "row": _row,
    "head": _head,
    "of heads": _of_heads,
    "whole": whole,
}


def _way(path: str, model: nn.Module) -> str:
    above, _, name = path.rpartition(".")
    siblings = {child for child, _ in model.get_submodule(above).named_children()}
    if path == "head":
        return "head"
    if name in COLUMN and siblings & ROW:  # a router has a gate too, with nothing that leads back
        return "column"
    if name in ROW and siblings & COLUMN:
        return "row"
    return "of heads" if name in HEAD_NORMS else "whole"


# What cannot be cut -------------------------------------------------------------------------------------------------------


def refuse_shared(model: nn.Module) -> None:
    """Parts would get a copy each of a tensor that they share. (A decoder without a head reads one embedding twice.)"""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            raise UnsupportedPair(
                f"{first} and {name} are the same tensor, which mesh.tensor and mesh.expert would take apart",
                hint="tie a head by leaving it out (head=None), or use mesh.data",
            )


def _refuse(path: str, module: nn.Module, size: int, way: str | None) -> None:
    cfg = getattr(module, "config", None)
    if hasattr(cfg, "kv_heads") and hasattr(module, "q"):
        _refuse_heads(path, cfg, size)
    if path.rpartition(".")[2] in COLUMN | ROW and way is None and hasattr(module, "format"):
        raise UnsupportedPair(
            f"{path} is packed ({type(module.format).__name__}), and tensor parallelism cuts dense weights only",
            hint="load the model with dense weights, or use mesh.data for it",
        )
    if way in ("column", "row"):
        if getattr(cfg, "dropout", 0.0):
            raise UnsupportedPair(
                f"{path} has dropout, which would differ between processes", hint="set dropout to 0 with mesh.tensor"
            )
        weight: Any = module.weight
        width = weight.shape[-2] if way == "column" else weight.shape[-1]
        if width % size:
            raise ConfigError(
                f"{path} has {width} channels to cut, which {size} processes do not divide",
                hint="choose mesh.tensor so that it divides hidden widths and heads",
            )


def _refuse_heads(path: str, cfg: Any, size: int) -> None:
    for name in ("heads", "kv_heads"):
        count = getattr(cfg, name)
        if count % size:
            fits = [n for n in range(size, 0, -1) if cfg.heads % n == 0 and cfg.kv_heads % n == 0]
            raise ConfigError(
                f"{path}.{name} is {count}, which mesh.tensor {size} does not divide",
                hint=f"use mesh.tensor {fits[0]}, and mesh.data for the other processes",
            )
    if hasattr(cfg, "near_norm"):
        raise UnsupportedPair(
            f"{path} has gains for each head, and mesh.tensor would give every process those of all heads",
            hint="use mesh.data for a model with RATTENTION",
        )
    if getattr(cfg, "norm_over", "head") == "all" and (cfg.q_norm is not None or cfg.k_norm is not None):
        raise UnsupportedPair(
            f"{path} normalises all its heads as one vector, and mesh.tensor gives each process some of them",
            hint="use mesh.data for this model",
        )
