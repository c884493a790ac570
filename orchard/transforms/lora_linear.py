"""A linear map of any weight format with a side path: LoRA (arXiv 2106.09685), rank-stabilised (arXiv 2312.03732), DoRA
(arXiv 2402.09353).

y = gain ⊙ (W x + scale · B (A x)) + b, where scale = alpha / r, or alpha / √r. B begins as zeros, so the map begins as it was.
Without DoRA there is no gain. With it each row of W + scale · B A has a trained length of its own, `lora_magnitude`, which begins
as that of W's row: gain = magnitude / ‖W + scale · B A‖, row by row. The lengths below the fraction are taken without gradient
(section 4.3 there), and without building the sum:

‖w + s B a‖² = ‖w‖² + 2 s (W Aᵀ · B) + s² (B (A Aᵀ) · B)

where W Aᵀ is one product with W as it lies, packed or not, and ‖w‖² is known as long as W stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import REQUIRED, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Plain
from orchard.nn.linear import Linear
from orchard.nn.lowering import floats
from orchard.ops.plan.builder import Builder, Value
from orchard.transforms.lora_twin import twin

TRAINED = ("lora_a", "lora_b", "lora_magnitude")
"""The parameters of a side path."""
TINY = 1e-30
"""Rows with a smaller square are as good as zero, and have no direction."""
State = tuple[tuple[int, int], ...]


class LoraLinear(Linear):
    """A linear map with a side path."""

    @config
    class Config(Linear.Config):
        r: int = REQUIRED
        alpha: float = REQUIRED
        rslora: bool = False
        """Scale by alpha / √r: large ranks keep learning."""
        dropout: float = 0.0
        """Of what the side path reads, in training."""
        dora: bool = False
        """Train the lengths of the adapted weight's rows too."""
        kept: bool = False
        """This side path belongs to the model (`Recover`): an adapter goes beside it and not in its place."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter
    """[out]; only with `dora`."""
    switched_in: bool = False
    """Whether `weight` holds the side path just now (`merged_in`)."""
    _known_squares: tuple[State, Tensor] | None = None
    _known_lengths: tuple[State, Tensor] | None = None

    def __init__(self, cfg: Config) -> None:
        check(cfg.r, cfg.alpha, cfg.dropout)
        super().__init__(cfg)
        self.config: Any = cfg
        shapes = {"lora_a": (cfg.r, cfg.in_dim), "lora_b": (cfg.out_dim, cfg.r), "lora_magnitude": (cfg.out_dim,)}
        for name in TRAINED if cfg.dora else TRAINED[:2]:
            self.register_parameter(name, nn.Parameter(self.begin[name](shapes[name])))

    @classmethod
    def around(
        cls, linear: Linear, r: int, alpha: float, rslora: bool = False, dropout: float = 0.0, dora: bool = False
    ) -> LoraLinear:
        """A linear map that is there already, with a side path that does nothing yet. The weight is the same tensor."""
        check(r, alpha, dropout)
        if type(linear) is not Linear:
            raise UnsupportedPair(f"{type(linear).__name__} takes no side path", hint="adapt plain linear maps")
        made: LoraLinear = cls.__new__(cls)
        made.__dict__.update(twin(linear).__dict__)
        made.config = linear.config.derive(cls, r=r, alpha=alpha, rslora=rslora, dropout=dropout, dora=dora)
        out_dim, in_dim = linear.shape
        with linear._first().device:
            made.lora_a = nn.Parameter(made.begin["lora_a"]((r, in_dim)))
            made.lora_b = nn.Parameter(made.begin["lora_b"]((out_dim, r)))
        if dora:
            made.lora_magnitude = nn.Parameter(made.begin["lora_magnitude"]((out_dim,)))
        return made

    @property
    def begin(self) -> dict[str, Callable[[tuple[int, ...]], Tensor]]:
        """What the side path begins with; a checkpoint of the model has none. The weight is there before its lengths are."""
        return {
            "lora_a": lambda shape: torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5),
            "lora_b": lambda shape: torch.zeros(shape),
            "lora_magnitude": lambda shape: self._squares().clamp_min(TINY).sqrt(),
        }

    @property
    def scale(self) -> float:
        r = int(self.config.r)
        return float(self.config.alpha) / (math.sqrt(r) if self.config.rslora else r)

    @property
    def gain(self) -> Tensor | None:
        """DoRA: what each row of the adapted weight is multiplied with, so that it gets its own length. float32."""
        return self.lora_magnitude.float() / self.lengths() if self.config.dora else None

    def set_magnitude(self, magnitude: Tensor) -> None:
        """Make it a DoRA side path whose rows have these lengths."""
        self.config = self.config.clone(dora=True)
        self.lora_magnitude = nn.Parameter(magnitude.float(), requires_grad=False)

    # The lengths of rows ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """‖W + scale · B A‖ of each row, float32 [out], without gradient."""
        # Outside training they are asked for at every token, and stay as long as what they are made of.
        keep = not self.training and not torch.compiler.is_compiling()
        state = _state((*self.packed().values(), self.lora_a, self.lora_b)) if keep else ()
        if keep and self._known_lengths is not None and self._known_lengths[0] == state:
            return self._known_lengths[1]
        with torch.autocast(self.lora_a.device.type, enabled=False):  # differences of large numbers: no bfloat16
            a, b, s = self.lora_a.float(), self.lora_b.float(), self.scale
            across = (self.format.matmul(a, self.packed()).mT * b).sum(1)
            own = (b @ (a @ a.mT) * b).sum(1)
            lengths = (self._squares() + 2 * s * across + s * s * own).clamp_min(TINY).sqrt()
        if keep:
            self._known_lengths = (state, lengths)
        return lengths

    @torch.no_grad()
    def _squares(self) -> Tensor:
        """‖W‖² of each row."""
        packed = self.packed().values()
        keep = not torch.compiler.is_compiling() and not any(part.requires_grad for part in packed)
        state = _state(packed) if keep else ()
        if keep and self._known_squares is not None and self._known_squares[0] == state:
            return self._known_squares[1]
        squares = self.dense(torch.float32).square().sum(1)
        if keep:
            self._known_squares = (state, squares)
        return squares

    def _forget(self) -> None:
        self._known_squares = self._known_lengths = None

    # Whatever changes tensors without their knowing it: other tensors in their place, other data in them.

    def train(self, mode: bool = True) -> LoraLinear:
        self._known_lengths = None
        return super().train(mode)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> LoraLinear:
        self._forget()
        return super()._apply(fn, recurse)

    def _place(self, packed: dict[str, Tensor]) -> None:
        self._forget()
        super()._place(packed)
        if "lora_magnitude" in self._parameters:  # another weight: the side path begins with its lengths
            self._begin_again()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget()
        if self.config.dora and f"{prefix}lora_magnitude" not in state_dict:
            self._begin_again()

    def _begin_again(self) -> None:
        old = self.lora_magnitude
        if not self._first().is_meta:
            fresh = self._squares().clamp_min(TINY).sqrt().to(old.dtype)
            self.lora_magnitude = nn.Parameter(fresh, requires_grad=old.requires_grad)

    # What it does -----------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.switched_in:
            return super().forward(x)
        seen = functional.dropout(x, self.config.dropout, self.training)
        narrow = functional.linear(seen, self.lora_a.to(x.dtype))
        side = self.scale * functional.linear(narrow, self.lora_b.to(x.dtype))
        gain = self.gain
        if gain is None:
            return super().forward(x) + side
        y = self.format.matmul(x, self.packed()) + side
        y = (y * gain).to(y.dtype)  # in float32, whatever y is: a gain learns by less than bfloat16 can tell
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def merged_weight(self) -> Tensor:
        """The dense weight that does the same. One that is packed would be rounded again by that, and is refused."""
        if not isinstance(self.format, Plain):
            raise UnsupportedPair(
                f"a side path cannot be merged into a weight of format {type(self.format).__name__}",
                hint="load the model with dense weights (dtype='float32') to merge adapters into it",
            )
        if self.switched_in:
            raise ConfigError("a side path is in the weight already", hint="leave `with merged_in(…)` first")
        with torch.no_grad():
            weight = self.dense(torch.float32) + self.scale * (self.lora_b.float() @ self.lora_a.float())
            gain = self.gain
            return (weight if gain is None else weight * gain[:, None]).to(self._first().dtype)

    def without(self) -> Linear:
        """The linear map alone, on the same tensors."""
        made: Linear = Linear.__new__(Linear)
        made.__dict__.update(twin(self).__dict__)
        made.config = self.config.derive(Linear)
        for name in TRAINED:
            made._parameters.pop(name, None)
        return made

    def merge(self) -> Linear:
        """One plain linear map that does the same."""
        weight = self.merged_weight()
        made = self.without()
        made.assign(weight)
        return made

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        gain = None if self.switched_in else floats(self.gain)
        y = builder.linear(x, self.native(), floats(self.bias), gain, path=path)
        if self.switched_in:
            return y
        a, b = floats(self.lora_a), floats(self.lora_b)
        assert a is not None and b is not None
        return builder.low_rank(x, a, b, self.scale if gain is None else self.scale * gain, y, path=f"{path}.lora")


def check(r: int, alpha: float, dropout: float) -> None:
    """Refuse numbers that no side path can have."""
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ConfigError(f"a side path of rank {r!r}", hint="use a whole number from 1")
    if not math.isfinite(alpha):
        raise ConfigError(f"alpha is {alpha!r}", hint="use a finite number")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout!r}", hint="use a number from 0 to below 1")


def _state(tensors: Iterable[Tensor]) -> State:
    """Tells tensors from what they were: which they are, and how often they were written to."""
    return tuple((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
