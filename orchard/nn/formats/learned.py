"""A weight in training whose values are those of a few levels: quantisation-aware training with learned scales.

Two tensors are trained: the weight, in float32, and the logarithm of a scale for each group of its columns. What the model
computes with is

    value = s · (clamp(round(w / s + zero), 0, 2^bits - 1) - zero)        s = exp(log_scale), rounded to half precision

which is exactly what `Int2`, `Int4` or `Int8` keep: `packed_as` says it in their words, and no value changes. (Eager torch is
meant: a compiler that turns the product and the sum into one instruction may decide otherwise on a weight that lies within
rounding of the border between two codes.)

Gradients (LSQ, arXiv 1902.08153; the clipped part as in PACT, arXiv 1805.06085): rounding counts as the identity. A weight inside
gets the gradient g of its value; `outside` says what others get. Inside reaches half a step beyond the last level, as far as
rounding alone would still choose it: every level then has a cell of one step. (LSQ clips before it rounds, and stops at the level
itself. For two bits that is a great deal: with the best scale of normally distributed weights 13 % of them lie beyond the last
level and 5 % beyond its cell.) The gradient of the scale is Σ g · (c - zero - w / s) over weights inside and Σ g · (c - zero)
over those outside, so that of its logarithm is Σ g · (value - w, or value alone outside). Rounding to half precision is passed
straight through.

Levels that reach further down than up (four bits: -8 … 7) may stand on their head: `sign` is chosen with the first scales and is
not trained. At four bits and groups of 64 that takes 8 % off the squared error of normally distributed weights.

Two bits have no level at zero, so a group of zeros cannot be had by any scale but zero. Such a dead group has a `log_scale` of
`DEAD`: its values are zeros, nothing in it gets a gradient, and it is packed with a scale of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, MissingExtra, UnsupportedPair
from orchard.nn.formats.base import (
    Format,
    Grouped,
    GroupedFormat,
    NativeWeight,
    Packed,
    PackedPart,
    as_half,
    counted,
    nearest,
)
from orchard.nn.formats.int2 import Int2
from orchard.nn.formats.int4 import Int4
from orchard.nn.formats.int8 import Int8
from orchard.nn.formats.learned_scales import best_scales

DEAD = -30.0
"""The logarithm of no scale at all: finite, so that averages of it are too."""
LEAST = -17.4
"""Logarithms below count as no scale. Half precision has nothing smaller either."""
LEVELS = ("balanced", "unbalanced")
OUTSIDE = ("stop", "inward", "pass")


class Learned(Configurable, Format):
    """For training only: `Qat` puts it in place and takes it out again."""

    @config
    class Config(BaseConfig):
        bits: int = 2
        group: int | None = 64
        """Columns that share a scale; None: the whole row."""
        levels: str = "balanced"
        """Of two bits: "balanced", s · (-1.5, -0.5, 0.5, 1.5), or "unbalanced", s · (-2, -1, 0, 1), which cannot be packed."""
        half: bool = True
        """Compute with scales as they are packed."""
        outside: str = "stop"
        """The gradient of weights beyond the last level's cell: "stop", none, as in LSQ; "inward", only what brings them back;
        "pass", as inside."""
        flip: bool = True
        """Whether levels that reach further down than up may stand on their head, group by group."""
        scaled: bool = False
        """Multiply gradients of scales by 1 / √(weights that share it · the largest level), as LSQ does. Adam does not notice."""

        def wire(self) -> None:
            if self.bits not in (2, 4, 8):
                raise ConfigError(f"weights of {self.bits} bits", hint="use 2, 4 or 8")
            for name, value, known in (("levels", self.levels, LEVELS), ("outside", self.outside, OUTSIDE)):
                if value not in known:
                    raise ConfigError(f"{name} cannot be {value!r}", hint="use one of " + ", ".join(known))
            if self.levels == "unbalanced" and self.bits != 2:
                raise ConfigError(f"{self.bits} bits have one set of levels", hint="leave levels at 'balanced'")

        def packed(self) -> Any:
            """The config of the format that keeps the same values."""
            if self.levels == "unbalanced":
                raise UnsupportedPair(
                    "unbalanced levels of two bits have no packed format",
                    hint="they are for comparison only: train balanced ones to keep the model",
                )
            if self.bits == 8:
                return Int8.Config(group=self.group, half=self.half)
            if not self.half:
                raise UnsupportedPair(
                    f"Int{self.bits} keeps scales in half precision", hint="train with half=True to keep the model"
                )
            return Int2.Config(group=self.group) if self.bits == 2 else Int4.Config(group=self.group)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        unbalanced = {2: 2.0, 4: 8.0, 8: 128.0}[cfg.bits]
        self.zero = 1.5 if cfg.bits == 2 and cfg.levels == "balanced" else unbalanced
        self.top = 2**cfg.bits - 1
        self.signed = cfg.flip and cfg.bits < 8 and 2 * self.zero != self.top
        kinds: dict[int, Any] = {2: Int2, 4: Int4, 8: Int8}
        self._kept: GroupedFormat = kinds[cfg.bits].Config(group=cfg.group).build()

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        *lead, width = shape
        groups = (*lead, width // self._kept.group(width))
        parts = {
            "weight": PackedPart(shape, torch.float32, trained=True),
            "log_scale": PackedPart(groups, torch.float32, trained=True),
        }
        return {**parts, "sign": PackedPart(groups, torch.int8)} if self.signed else parts

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> Packed:
        """The weight as it is, and the scales that give it back best. `importance` weighs errors and broadcasts to the weight."""
        group = self._kept.group(weight.shape[-1])
        values = weight.detach().float()
        split = None if importance is None else counted(importance, values).unflatten(-1, (-1, group))
        scales = best_scales(
            values.unflatten(-1, (-1, group)),
            zero=self.zero,
            bits=self.config.bits,
            half=self.config.half,
            either=self.signed,
            importance=split,
        )
        size = scales.abs()
        packed = {"weight": values, "log_scale": size.log().masked_fill(size == 0, DEAD)}
        return {**packed, "sign": torch.where(scales < 0, -1, 1).to(torch.int8)} if self.signed else packed

    def scales(self, packed: Packed) -> Tensor:
        """What the model computes with, float32 [..., groups]."""
        return _scales(packed["log_scale"], packed.get("sign"), self.config.half)

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        weight, log_scale = packed["weight"], packed["log_scale"]
        settings = (self.zero, self.top, self.config.half, self.config.outside, self._factor(weight, log_scale), dtype)
        made: Tensor = Levelled.apply(weight, log_scale, packed.get("sign"), *settings)
        return made

    @torch.no_grad()
    def values(self, packed: Packed, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The same with scales that were made before, and nothing to take a gradient of."""
        return _values(packed["weight"], scales, self.zero, self.top, dtype)

    @torch.no_grad()
    def slopes(self, packed: Packed, scales: Tensor, grad: Tensor) -> Packed:
        """What a gradient of the values is to each part that is trained."""
        weight, log_scale = packed["weight"], packed["log_scale"]
        factor = self._factor(weight, log_scale)
        of_weight, of_scale = _slopes(weight, scales, grad, self.zero, self.top, self.config.outside, factor)
        return {"weight": of_weight.to(weight.dtype), "log_scale": of_scale.to(log_scale.dtype)}

    def matmul(self, x: Tensor, packed: Packed) -> Tensor:
        # In the dtype of the product at once: autocast would cast the values again.
        return functional.linear(x, self.unpack(packed, computed_in(x)))

    def fake(self, weight: Tensor) -> Tensor:
        rounded = self.unpack(self.pack(weight.detach()), weight.dtype)
        return weight + (rounded - weight).detach()

    @torch.no_grad()
    def packed_as(self, packed: Packed) -> tuple[Any, Packed]:
        """The config of a packed format, and this weight in it with the same values. `UnsupportedPair` where there is none."""
        cfg = self.config.packed()
        form: GroupedFormat = cfg.build()
        weight, scales = packed["weight"].detach(), self.scales(packed)
        values = weight.float().unflatten(-1, (scales.shape[-1], -1))
        codes = nearest(values, scales, self.zero, self.config.bits).flatten(-2)
        kept = as_half(scales) if self.config.half else scales
        return cfg, form.keep(Grouped(codes, kept, None, self.config.bits, values.shape[-1]))

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        cfg, kept = self.packed_as(packed)
        weight: NativeWeight = cfg.build().native(kept, shape)
        return weight

    def _factor(self, weight: Tensor, log_scale: Tensor) -> float:
        if not self.config.scaled:
            return 1.0
        return float((weight.shape[-1] // log_scale.shape[-1] * max(self.zero, self.top - self.zero)) ** -0.5)


class Levelled(torch.autograd.Function):
    """Levels out of weights and scales. Nothing but those two is kept for the backward pass: codes are found again there."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        log_scale: Tensor,
        sign: Tensor | None,
        zero: float,
        top: int,
        half: bool,
        outside: str,
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(weight, log_scale, sign)
        ctx.settings = (zero, top, half, outside, factor)
        return _values(weight, _scales(log_scale, sign, half), zero, top, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, log_scale, sign = ctx.saved_tensors
        zero, top, half, outside, factor = ctx.settings
        scale = _scales(log_scale, sign, half)
        of_weight, of_scale = _slopes(weight, scale, grads[0], zero, top, outside, factor)
        rest = (None,) * 7
        return of_weight.to(weight.dtype), of_scale.to(log_scale.dtype), *rest


def _values(weight: Tensor, scale: Tensor, zero: float, top: int, dtype: torch.dtype) -> Tensor:
    """What a weight [..., n] is with scales [..., groups]."""
    kernels = _kernels(weight)
    if kernels is not None:
        made: Tensor = kernels.level_on_gpu(weight, scale, zero, top, dtype)
        return made
    scale = scale[..., None]
    places = _places(weight, scale, zero)
    return ((places.round().clamp(0, top) - zero) * scale).flatten(-2).to(dtype)


def _slopes(
    weight: Tensor, scale: Tensor, grad: Tensor, zero: float, top: int, outside: str, factor: float
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and log-scale, from that of the values."""
    kernels = _kernels(weight)
    if kernels is not None:
        found: tuple[Tensor, Tensor] = kernels.slope_on_gpu(weight, scale, grad, zero, top, outside, factor)
        return found
    groups, scale = scale.shape[-1], scale[..., None]
    places = _places(weight, scale, zero)
    g = grad.float().unflatten(-1, (groups, -1))
    w = weight.float().unflatten(-1, (groups, -1))
    alive = scale != 0
    inside = (places >= -0.5) & (places <= top + 0.5)
    value = (places.round().clamp(0, top) - zero) * scale
    of_scale = (g * (value - torch.where(inside & alive, w, 0.0))).sum(-1) * factor
    through = inside
    if outside == "inward":  # a step goes against the gradient: above zero, it takes away from what is too high
        back = g * scale
        through = inside | torch.where(places > 0, back > 0, back < 0)
    elif outside == "pass":
        through = torch.ones_like(inside)
    return torch.where(through & alive, g, 0.0).flatten(-2), of_scale


def _kernels(weight: Tensor) -> Any:
    """The GPU's kernels, where they serve: on whole tensors of a GPU that torch has Triton for."""
    if not weight.is_cuda or weight.dtype != torch.float32 or hasattr(weight, "placements"):
        return None
    try:
        from orchard.ops.kernels.triton import levels
    except (ImportError, MissingExtra):
        return None
    return levels


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a product with x: autocast's, where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _scales(log_scale: Tensor, sign: Tensor | None, half: bool) -> Tensor:
    scales = log_scale.detach().float().exp()
    scales = as_half(scales).float() if half else scales.masked_fill(log_scale < LEAST, 0.0)
    return scales if sign is None else scales * sign


def _places(weight: Tensor, scale: Tensor, zero: float) -> Tensor:
    """Where weights lie among the levels, before rounding: [..., groups, group]. In the middle, where there is no scale."""
    inverse = scale.reciprocal().masked_fill(scale == 0, 0.0)
    return weight.float().unflatten(-1, (scale.shape[-2], -1)) * inverse + zero
