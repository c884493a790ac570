"""A copy of a state in CPU memory, from which a thread writes while training goes on.

The plan of what this process holds is made at the same moment, from the tensors themselves: shards know their offsets only as
long as they are DTensors. Memory for the copy is kept for the next one (pinned, where the state is on a GPU), so a run needs
room for one copy and no more.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import find_state_dict_object

from orchard.core.errors import UsageError
from orchard.train.checkpoint_tensors import dtype_name
from orchard.train.state import (
    AVERAGES,
    MODEL,
    OPTIMIZER,
    Slot,
    TrainState,
    is_shared_out,
    named,
    settings,
    slots,
    trained_only,
)


class Buffers:
    """CPU memory for copies, by tensor and part."""

    def __init__(self) -> None:
        self._kept: dict[MetadataIndex, Tensor] = {}

    def fill(self, plan: SavePlan, tensors: dict[str, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies of everything in the plan. What the plan has no more is let go."""
        before, self._kept = self._kept, {}
        devices = set()
        for item in plan.items:
            source = find_state_dict_object(tensors, item.index).detach()
            target = before.get(item.index)
            if target is None or target.shape != source.shape or target.dtype != source.dtype:
                target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            target.copy_(source, non_blocking=source.is_cuda)
            self._kept[item.index] = target
            if source.is_cuda:
                devices.add(source.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return self._kept


class Snapshot:
    """What this process holds of a state: `plan`, the copied `data`, and the JSON `document`."""

    def __init__(self, state: TrainState, buffers: Buffers, *, rank: int = 0) -> None:
        tensors, self.document = flatten(state, rank)
        for name, tensor in tensors.items():
            dtype_name(tensor.dtype, name)
        self.plan = create_default_local_save_plan(tensors, rank == 0)
        self.data = buffers.fill(self.plan, tensors)


class SnapshotPlanner(DefaultSavePlanner):
    """torch's planner, with a plan and data that are there already."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        self.plan = self._snapshot.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._snapshot.data[index]


def flatten(state: TrainState, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor by name, and everything else as plain values that nobody changes any more."""
    everything = named(state.model)
    found = everything if state.frozen else trained_only(everything)
    tensors = {MODEL + name: tensor for name, tensor in found.tensors.items()}
    document: dict[str, Any] = {
        "aliases": {MODEL + alias: MODEL + name for alias, name in found.aliases.items()},
        "optimizer": _optimizer(list(slots(state.optimizer, everything)), tensors, rank),
        "extra": state.extra,
    }
    document["optimizer"]["kind"] = type(state.optimizer).__name__
    if state.ema is not None:
        kept = state.ema.state_dict()
        tensors |= {AVERAGES + name: tensor for name, tensor in kept["averages"].items()}
        document["ema"] = {"updates": kept["updates"]}
    try:
        return tensors, json.loads(json.dumps(document))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"something besides tensors cannot be stored as JSON: {error}",
            hint="keep numbers, texts, lists and dicts in `extra` and in the optimiser's groups",
        ) from error


def _optimizer(parameters: list[Slot], tensors: dict[str, Tensor], rank: int) -> dict[str, Any]:
    """parameters: name → settings of its group; values: what is no tensor; layout: how each tensor of the state lies."""
    values: dict[str, Any] = {}
    layout: dict[str, Any] = {}
    for slot in parameters:
        for key, value in slot.state.items():
            if not isinstance(value, Tensor):
                values.setdefault(slot.name, {})[key] = value
                continue
            name = f"{OPTIMIZER}{slot.name}/{key}"
            about: dict[str, Any] = {"parameter": slot.name, "key": key}
            if value.device.type == "cpu" and (key == "step" or slot.parameter.device.type != "cpu"):
                about["place"] = "cpu"
            if is_shared_out(value):
                about["placements"] = [_placement(one) for one in value.placements]  # type: ignore[attr-defined]
            elif is_shared_out(slot.parameter) and value.ndim:
                # The state of this process's shard alone (8-bit blocks): no other process has the same.
                name += f"#{rank}"
                about["shard"] = list(slot.parameter.to_local().shape)  # type: ignore[attr-defined]
            tensors[name] = value
            layout[name] = about
    return {
        "parameters": {slot.name: settings(slot.group) for slot in parameters},
        "values": values,
        "layout": layout,
    }


def _placement(one: Any) -> int | None:
    """The axis that is shared out, or None for a copy on each process."""
    return int(one.dim) if one.is_shard() else None
