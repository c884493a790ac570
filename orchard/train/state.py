"""What a run is at one moment: the model, its optimiser, the averages, and plain values; and how all of it is named.

Checkpoints see a state as tensors with names and one JSON document. A tensor's name begins with what it belongs to
(`model/…`, `optimizer/parameter/key`, `ema/…`). Names are the model's own, without what wrappers (torch.compile, recomputing)
add to them, so a run may go on with other wrappers and, because optimiser states go by names and not by numbers, on another
number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.errors import ConfigError
from orchard.train.ema import EMA

DIGEST = "digest"
"""The key of `extra` that holds the digest of the run's config, where there is one."""
MODEL, OPTIMIZER, AVERAGES = "model/", "optimizer/", "ema/"
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
NOT_SETTINGS = ("params", "names", "param_names")


@dataclass
class TrainState:
    """`extra` is stored as JSON: step, place in the data, tokens seen, the config's digest (`DIGEST`) …"""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    frozen: bool = True
    """Whether what is not trained is stored too. An adapter's run can do without: its base model is somewhere else."""


@dataclass(frozen=True)
class Named:
    """The model's tensors by name, each once; `aliases` are further names of shared ones: second name → first name."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def plain(name: str) -> str:
    """A parameter's name without what wrappers added."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named(model: nn.Module) -> Named:
    """Parameters and lasting buffers. Asking for a state dict makes FSDP2 put its shards back in place first."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    everything = model.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for full, tensor in everything.items():
        name = plain(full)
        if not isinstance(tensor, Tensor) or id(tensor) not in own:
            raise ConfigError(
                f"{name} is no parameter or buffer of the model", hint="checkpoints hold parameters and buffers only"
            )
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return Named(tensors, aliases)


def trained_only(found: Named) -> Named:
    """Without frozen parameters and buffers."""
    kept = {name: tensor for name, tensor in found.tensors.items() if tensor.requires_grad}
    return Named(kept, {alias: name for alias, name in found.aliases.items() if name in kept})


@dataclass(frozen=True)
class Slot:
    """One parameter of an optimiser: its name, its group and its state."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


def slots(optimizer: torch.optim.Optimizer, found: Named) -> Iterator[Slot]:
    """Every parameter the optimiser updates, by the model's name or by the one its group gives it."""
    names = {id(tensor): name for name, tensor in found.tensors.items()}
    for group in optimizer.param_groups:
        given = group.get("names") or group.get("param_names") or [None] * len(group["params"])
        for parameter, other in zip(group["params"], given, strict=True):
            name = names.get(id(parameter)) or (plain(other) if other else None)
            if name is None:
                raise ConfigError(
                    f"the optimiser updates a parameter of shape {list(parameter.shape)} that the model does not have",
                    hint="build the optimiser from the parameters of the model that is saved",
                )
            yield Slot(name, parameter, group, optimizer.state.get(parameter, {}))


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a group holds besides its parameters, as plain values (a learning rate may be a tensor)."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in NOT_SETTINGS
    }


def restore_settings(group: dict[str, Any], stored: dict[str, Any]) -> None:
    for key, value in stored.items():
        mine = group.get(key)
        if isinstance(mine, Tensor):
            mine.copy_(torch.as_tensor(value))
        else:  # JSON knows no tuples
            group[key] = tuple(value) if isinstance(mine, tuple) and isinstance(value, list) else value


def is_shared_out(tensor: Tensor) -> bool:
    """Whether this is a DTensor: a tensor of which each process holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
