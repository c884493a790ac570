"""What all optimisers share: groups from rules, narrow parameters that are updated in float32, states that come back bit for bit.

A bfloat16 parameter keeps 8 bits of mantissa, so a step of a thousandth of its size is rounded away. `narrow` says what is done:

- "float32": a float32 copy is kept beside it (4 bytes more) and takes the steps; the parameter is its rounding.
- "rest": what rounding cut off is kept beside it in bfloat16 (2 bytes more; Kahan's compensation). Together they have 16 bits of
  mantissa.
- "none": steps are computed in float32 and rounded.

torch's own `load_state_dict` casts states to the dtype of their parameter, which would ruin float32 moments of bfloat16
parameters and turn 8-bit codes into floats; the one here copies what was stored. States hold tensors only (the count of steps is
a scalar tensor on the CPU, as in torch), groups hold plain numbers and names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UsageError
from orchard.train.optim.groups import Group, Named, Rules

NARROW = ("float32", "rest", "none")
State = dict[str, Any]


class Optimizer(torch.optim.Optimizer):
    """A torch optimiser whose subclasses say how one group is updated in float32. `group["lr"]` is set from outside, by a
    schedule; `initial_lr` is what the config said."""

    config: Any

    def __init__(self, cfg: Any, named_parameters: Named) -> None:
        check(cfg)
        self.config = cfg
        groups = [self._settings(group) for group in Rules(cfg.rules).split(named_parameters)]
        super().__init__(groups, {})

    def settings(self, group: Group) -> dict[str, Any]:
        """What a group's own dictionary holds besides lr and decay: plain numbers."""
        return {}

    @abstractmethod
    def update(self, group: dict[str, Any], items: Sequence[tuple[Tensor, Tensor, State]]) -> None:
        """Change each wide parameter in place, given its wide gradient and its state (empty at first)."""

    def _settings(self, group: Group) -> dict[str, Any]:
        cfg = self.config
        rate = cfg.lr * group.rate
        mine = {"lr": rate, "initial_lr": rate, "decay": cfg.decay if group.decay else 0.0, **self.settings(group)}
        return {"params": group.parameters, "names": group.names, "matrix": group.matrix, **mine}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if any(parameter.grad.is_sparse for parameter in used):
                raise UsageError("a gradient is sparse", hint="build the embedding without sparse gradients")
            items = [(self._widen(p, self.state[p]), wide(p.grad), self.state[p]) for p in used]
            self.update(group, items)
            for parameter, (value, _, state) in zip(used, items):
                self._narrow(parameter, value, state)
        return result

    def _widen(self, parameter: Tensor, state: State) -> Tensor:
        """The value that takes the step: the parameter itself, or a float32 stand-in."""
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        if self.config.narrow == "float32":
            if "master" not in state:
                state["master"] = parameter.float()
            master: Tensor = state["master"]
            return master
        value = parameter.float()
        return value + state["rest"].float() if "rest" in state else value

    def _narrow(self, parameter: Tensor, value: Tensor, state: State) -> None:
        if value is parameter:
            return
        parameter.copy_(value)
        if self.config.narrow == "rest":
            state["rest"] = (value - parameter.float()).to(parameter.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state exactly as it was stored. The groups have to have the same parameters, by name."""
        stored, mine = state_dict["param_groups"], self.param_groups
        if [group["names"] for group in stored] != [group["names"] for group in mine]:
            raise ConfigError(
                "the stored optimiser state belongs to other parameters: " + _first_difference(stored, mine),
                hint="resume with the config the run was started with",
            )
        # Keys are numbers, or names from torch.distributed.checkpoint; JSON turns the former into text.
        known = {
            str(key): parameter
            for group, other in zip(mine, stored)
            for parameter, key in zip(group["params"], other["params"], strict=True)
        }
        self.state.clear()
        for key, values in state_dict["state"].items():
            parameter = known[str(key)]
            self.state[parameter] = {
                name: _placed(name, value, parameter) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
        for group, other in zip(mine, stored):
            group.update({name: value for name, value in other.items() if name not in ("params", "names")})


def check(cfg: Any) -> None:
    """Refuse settings with which nothing could be learnt."""
    if cfg.narrow not in NARROW:
        raise ConfigError(f"narrow is {cfg.narrow!r}", hint="use one of " + ", ".join(NARROW))
    if not cfg.lr >= 0 or not cfg.decay >= 0:
        raise ConfigError(f"lr is {cfg.lr} and decay is {cfg.decay}", hint="neither may be below 0")


def wide(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def count(state: State) -> int:
    """One more step; how many it has been."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    state["step"] += 1
    return int(state["step"])


def _placed(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A copy, so that the stored state can be used again; on the parameter's device, except for counts."""
    return value.clone() if name == "step" else value.to(parameter.device, copy=True)


def _first_difference(stored: list[dict[str, Any]], mine: list[dict[str, Any]]) -> str:
    one, other = ({name for group in groups for name in group["names"]} for groups in (stored, mine))
    if one != other:
        return f"{sorted(one ^ other)[0]} is only in one of them"
    return "they are grouped in another way"
