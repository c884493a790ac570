"""AdamW (arXiv 1412.6980, decoupled decay: arXiv 1711.05101), by torch's own update.

Values and rounding are torch's: with `fused` on or off they are those of `torch.optim.AdamW(fused=True)` or of the plain loop.
Works on DTensor parameters as torch's does: moments are sharded like their parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from orchard.core.config import BaseConfig, Configurable, config
from orchard.train.optim.base import Optimizer, State
from orchard.train.optim.groups import Named, Rules


class AdamW(Configurable, Optimizer):
    """Two moments in float32 per parameter (or the parameter's own dtype if wider)."""

    @config
    class Config(BaseConfig):
        lr: float = 3e-4
        betas: tuple[float, float] = (0.9, 0.95)
        eps: float = 1e-8
        decay: float = 0.1
        fused: bool | None = None
        """One pass over memory instead of a dozen. It rounds in another order than the plain loop, so results differ from that
        in their last bits; None: where torch has it, on CPUs and CUDA."""
        narrow: str = "float32"
        rules: Rules.Config = field(default_factory=Rules.Config)

    def __init__(self, cfg: Config, *, named_parameters: Named) -> None:
        super().__init__(cfg, named_parameters)

    def update(self, group: dict[str, Any], items: Sequence[tuple[Tensor, Tensor, State]]) -> None:
        adamw_update(group, items, betas=self.config.betas, eps=self.config.eps, fused=self.config.fused)


def adamw_update(
    group: dict[str, Any],
    items: Sequence[tuple[Tensor, Tensor, State]],
    *,
    betas: tuple[float, float],
    eps: float,
    fused: bool | None,
) -> None:
    """One step for all parameters of a group; `group` gives lr and decay."""
    if not items:
        return
    kinds = {value.device.type for value, _, _ in items}
    if fused is None:
        fused = kinds <= {"cpu", "cuda"}
    for value, _, state in items:
        if "m" not in state:
            # The fused kernel wants its counts where the parameters are.
            place = value.device if fused else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state["m"], state["v"] = torch.zeros_like(value), torch.zeros_like(value)
    adamw(
        [value for value, _, _ in items],
        [gradient for _, gradient, _ in items],
        [state["m"] for _, _, state in items],
        [state["v"] for _, _, state in items],
        [],
        [_step_for(state, value, fused) for value, _, state in items],
        foreach=kinds == {"cuda"} and not fused,
        fused=fused,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=group["lr"],
        weight_decay=group["decay"],
        eps=eps,
        maximize=False,
    )


def _step_for(state: State, value: Tensor, fused: bool) -> Tensor:
    """The count of steps, where the kernel wants it: a state may have been stored by another kind of run."""
    place = value.device if fused else torch.device("cpu")
    if state["step"].device != place:
        state["step"] = state["step"].to(place)
    step: Tensor = state["step"]
    return step
