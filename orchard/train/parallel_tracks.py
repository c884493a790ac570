"""Tracks shared out over processes in training: each has its own tracks of every layer, and all that is outside of tracks.

The processes read the same data. What they exchange is what tracks exchange at their ends (`orchard.nn.tracks_apart`): hidden
vectors on the way forward, their gradients on the way back, once for every layer of tracks. Parameters outside of tracks are on
every process and get the same gradients there.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from orchard.core.errors import ConfigError

TRACK = "tracks"
"""What the list of a layer's tracks is called."""


def split_tracks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each process of the dimension its own tracks, in place."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, TRACK) and hasattr(module, "keep")]
    if not layers:
        raise ConfigError(
            f"mesh.track is {mesh.size()}, and the model has no tracks", hint="use mesh.data or mesh.tensor"
        )
    layers[0].keep(model, mesh.get_group())  # of all layers together: a model is cut whole or not at all


def in_tracks(name: str) -> bool:
    """Whether a parameter belongs to a track."""
    return f".{TRACK}." in name
