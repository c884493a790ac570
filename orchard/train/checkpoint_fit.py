"""Whether a checkpoint belongs to a state, and where each of its tensors goes.

Nothing of the state is touched before everything was found to fit. Optimisers make their states at their first step, so a fresh
one has none: memory for them is made here, laid out like the parameter it belongs to, on however many processes there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.train.checkpoint_manifest import Manifest
from orchard.train.checkpoint_tensors import DTYPES
from orchard.train.checkpoint_together import Together
from orchard.train.state import (
    AVERAGES,
    DIGEST,
    MODEL,
    OPTIMIZER,
    Slot,
    TrainState,
    is_shared_out,
    named,
    restore_settings,
    slots,
    trained_only,
)

SAME = "resume with the config the run was started with, or load another step or folder"


class Fit:
    """`targets`: stored name → the tensor to fill; `finish()` hands over what had to be made. All processes together."""

    def __init__(self, state: TrainState, manifest: Manifest, together: Together) -> None:
        self.state, self.manifest, self.together = state, manifest, together
        everything = named(state.model)
        found = everything if state.frozen else trained_only(everything)
        self.targets: dict[str, Tensor] = {MODEL + name: tensor for name, tensor in found.tensors.items()}
        if state.ema is not None:
            self.targets |= {AVERAGES + name: tensor for name, tensor in state.ema.averages.items()}
        self.slots = {slot.name: slot for slot in slots(state.optimizer, everything)}
        self._made: dict[str, dict[str, Any]] = {}

    def check(self) -> None:
        """Raise what does not fit, by name; then make room for the optimiser's state."""
        tensors, aliases = self.manifest.tensors, self.manifest.aliases
        offered = {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
        mine = self.together.each(lambda: (set(self.targets), set(self.slots)))
        expected = set[str]().union(*(names for names, _ in mine))
        for alias, name in aliases.items():
            expected |= {name} if alias in expected else set()
        parameters = set[str]().union(*(names for _, names in mine))
        stored = self.manifest.optimizer.get("parameters", {})
        self.together.alike(lambda: self._names(offered, expected, parameters, stored))
        self.together.alike(self._make)

    def finish(self) -> None:
        """The state is the stored one: call when all targets are filled."""
        optimizer, about = self.state.optimizer, self.manifest.optimizer
        optimizer.state.clear()
        for name, slot in self.slots.items():
            kept = {**self._made.get(name, {}), **about.get("values", {}).get(name, {})}
            if kept:
                optimizer.state[slot.parameter] = kept
        for slot in self.slots.values():
            restore_settings(slot.group, about["parameters"][slot.name])
        if self.state.ema is not None:
            self.state.ema.updates = int(self.manifest.ema["updates"])
        self.state.extra.clear()
        self.state.extra.update(self.manifest.extra)

    def _names(self, offered: dict[str, Any], expected: set[str], parameters: set[str], stored: dict[str, Any]) -> None:
        problems = [
            _few("is missing", set(self.targets) - offered.keys()),
            _few("is not in this model", {n for n in self.manifest.tensors.keys() - expected if not _is_state(n)}),
            _few("is trained here and was not", {OPTIMIZER + name for name in parameters - stored.keys()}),
            _few("was trained and is not here", {OPTIMIZER + name for name in stored.keys() - parameters}),
        ]
        wrong = []
        for name in sorted(self.targets.keys() & offered.keys()):
            shape, dtype, target = offered[name]["shape"], DTYPES[offered[name]["dtype"]], self.targets[name]
            if shape != list(target.shape) or dtype != target.dtype:
                wrong.append(f"{name} is {dtype} {shape} there and {target.dtype} {list(target.shape)} here")
        problems.append("; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
        said = [problem for problem in problems if problem]
        if said:
            raise ConfigError(f"step {self.manifest.step} does not fit this run: " + "; ".join(said), hint=SAME)
        kind, mine = self.manifest.optimizer.get("kind"), type(self.state.optimizer).__name__
        if kind != mine:
            raise ConfigError(f"step {self.manifest.step} was optimised by {kind}, and this is {mine}", hint=SAME)
        for group in self.state.optimizer.param_groups:
            settings = [stored[slot.name] for slot in self.slots.values() if slot.group is group]
            if any(one != settings[0] for one in settings):
                raise ConfigError("parameters are grouped in another way than in the checkpoint", hint=SAME)

    def _make(self) -> None:
        mine, others = set(), {}
        for name, about in self.manifest.optimizer.get("layout", {}).items():
            slot = self.slots.get(about["parameter"])
            if slot is None:
                continue
            part = name.partition("#")[0]
            if not self._mine(name, about, slot):
                others[part] = name
                continue
            stored = self.manifest.tensors[name]
            made = _room(slot.parameter, stored["shape"], DTYPES[stored["dtype"]], about)
            self.targets[name] = made
            self._made.setdefault(slot.name, {})[about["key"]] = made
            mine.add(part)
        for part in sorted(others.keys() - mine):
            raise self._uncut(
                others[part], "another process's shard (its parameter was on another stage of the pipeline)"
            )

    def _mine(self, name: str, about: dict[str, Any], slot: Slot) -> bool:
        """Whether this process loads it. States of one shard cannot be cut or joined."""
        shared = is_shared_out(slot.parameter)
        if "shard" not in about:
            stored = self.manifest.tensors[name]
            whole = not (shared and stored["shape"] and not DTYPES[stored["dtype"]].is_floating_point)
            if not whole:
                raise self._uncut(name, "a whole parameter")
            return True
        local = list(slot.parameter.to_local().shape) if shared else None  # type: ignore[attr-defined]
        if self.manifest.processes != self.together.size:
            raise self._uncut(name, f"shards of {self.manifest.processes} processes")
        if not name.endswith(f"#{self.together.rank}"):
            return False
        if local != about["shard"]:
            raise self._uncut(name, f"a shard of shape {about['shard']}")
        return True

    def _uncut(self, name: str, of: str) -> UnsupportedPair:
        return UnsupportedPair(
            f"{name.partition('#')[0]} is the state of {of}: it cannot be shared out anew, over {self.together.size}",
            hint=f"go on with {self.manifest.processes} processes, or train with AdamW, Muon or Adafactor",
        )


def check_config(state: TrainState, manifest: Manifest) -> None:
    """Refuse a checkpoint of another config. Where either side names none, nothing can be said."""
    mine, stored = state.extra.get(DIGEST), manifest.extra.get(DIGEST)
    if mine is not None and stored is not None and mine != stored:
        raise ConfigError(
            f"step {manifest.step} was written with another config ({stored}; this is {mine})",
            hint="resume with the config the run was started with, or load with other_config=True if you mean it",
        )


def _room(parameter: Any, shape: list[int], dtype: torch.dtype, about: dict[str, Any]) -> Tensor:
    """Memory for one tensor of an optimiser's state."""
    place = torch.device("cpu") if about.get("place") == "cpu" else parameter.device
    if not is_shared_out(parameter) or "shard" in about or ("placements" not in about and not shape):
        if shape == list(parameter.shape) and place == parameter.device and not is_shared_out(parameter):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # with its strides
        return torch.empty(shape, dtype=dtype, device=place)
    if shape == list(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh, axes = parameter.device_mesh, about.get("placements")
    if axes is None or len(axes) != mesh.ndim:
        axes = [None] * mesh.ndim  # small (rows, columns): a copy on each process is right, if not the thriftiest
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _is_state(name: str) -> bool:
    return name.startswith(OPTIMIZER)


def _few(what: str, names: Iterable[str]) -> str:
    """`a, b, c and 4 more: what`, or nothing."""
    listed = sorted(names)
    if not listed:
        return ""
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + f"{more}: {what}"
