"""The format contract. A format holds no state: the module keeps the packed tensors, the format reads and writes them.

Weights are [..., out, in]; leading dimensions are experts. A `GroupedFormat` keeps small whole numbers that share a scale
by groups of input channels. `Grouped` is what all of those have in common: files are read into it, and the native engine's
layout is written from it, without a dense weight in between.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.errors import ConfigError, OrchardError
from orchard.nn.formats.through import through
from orchard.ops.kernels.packing import pack_codes, pack_plain

Packed = dict[str, Tensor]
NATIVE_GROUP = 32
"""The native engine's groups are multiples of this."""
ALIGNMENT = 64
PIECE = 1 << 16
"""Values that a search works on at a time."""
LARGE = 1 << 17
"""Bytes of codes that are unpacked at a time."""
_HALF_MAX = torch.finfo(torch.float16).max


class NotLowered(OrchardError):
    """Something has no native form. The message is the reason; it then runs in torch."""

    code = "not-lowered"

    @property
    def reason(self) -> str:
        return self.message


@dataclass(frozen=True)
class PackedPart:
    """One tensor of a packed weight. `dtype` None means the dtype the model computes in."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    trained: bool = False


@dataclass(frozen=True)
class Grouped:
    """Whole numbers with a scale per group of columns: value = scale · (code - zero) + minimum.

    `codes` is uint8 [..., out, in], unsigned and one to a byte; `scales` and `minima` are float16 [..., out, groups].
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int
    group: int

    @property
    def zero(self) -> float:
        """The code of zero. Two bits have no such code: their four levels are balanced around it."""
        if self.minima is not None:
            return 0.0
        return {8: 128.0, 4: 8.0, 2: 1.5}[self.bits]

    def dense(self) -> Tensor:
        """The values in float32. For 8 bits and fewer every product is exact there."""
        # In place: training unpacks every weight twice a step, and fresh memory costs more than the arithmetic.
        values = self.codes.float().unflatten(-1, (self.scales.shape[-1], -1))
        if self.zero:
            values.sub_(self.zero)
        values.mul_(self.scales.float()[..., None])
        if self.minima is not None:
            values.add_(self.minima.float()[..., None])
        return values.flatten(-2)

    def to(self, device: torch.device | str) -> Grouped:
        minima = None if self.minima is None else self.minima.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), minima=minima)


@dataclass(frozen=True)
class NativeWeight:
    """A weight as the native engine reads it: `kind` as in a plan's steps, `count` matrices [rows, cols] one after another in
    `data` (uint8). The layout is described in ops/kernels/native/kernels.h."""

    kind: str
    group: int
    minimum: bool
    rows: int
    cols: int
    count: int
    data: np.ndarray


class Format(ABC):
    """How a weight lives."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        """The tensors that hold a weight of this shape."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Packed: ...

    @abstractmethod
    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The dense weight."""

    def rows(self, packed: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of a weight [out, in], as an embedding looks them up: dense [..., in] for ids [...]. Formats whose
        parts do not begin with a dimension of rows have one of their own."""
        # Not `part[ids]`: the gradient of looking up is many times faster than that of an index.
        looked_up = {
            name: functional.embedding(ids, part) if part.dim() == 2 and part.is_floating_point() else part[ids]
            for name, part in packed.items()
        }
        return self.unpack(looked_up, dtype)

    @abstractmethod
    def fake(self, weight: Tensor) -> Tensor:
        """`unpack(pack(weight))` with gradients straight through, for training."""

    def matmul(self, x: Tensor, packed: Packed) -> Tensor:
        """x [..., in] times the weight [out, in] transposed. Formats with kernels of their own do better than this."""
        return through(x, self, packed)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exact bytes of a packed weight."""
        parts = self.layout(shape).values()
        return sum(torch.Size(part.shape).numel() * (part.dtype or dtype).itemsize for part in parts)

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        """The weight for the native engine, with the values it has here; `NotLowered` where that cannot be."""
        raise NotLowered(f"format {type(self).__name__} has no native layout")


class GroupedFormat(Format):
    """A format that can hold a `Grouped` as it is. Its config has a `group` (None: the whole row)."""

    bits: ClassVar[int]
    config: Any

    @property
    def has_minimum(self) -> bool:
        return False

    def group(self, width: int) -> int:
        """Columns that share a scale in rows of this width; a width that groups or bytes do not divide is refused."""
        name, group = type(self).__name__, self._asked_group(width)
        if group < 1 or width % group:
            raise ConfigError(f"{name} groups of {group} do not divide a width of {width}", hint="choose a divisor")
        if width * self.bits % 8:
            raise ConfigError(f"{width} codes of {self.bits} bits are no whole number of bytes", hint="use Int8")
        return group

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        *lead, width = shape
        per_group = PackedPart((*lead, width // self.group(width)), torch.float16)
        parts = {"codes": PackedPart((*lead, width * self.bits // 8), torch.uint8), "scales": per_group}
        return {**parts, "minima": per_group} if self.has_minimum else parts

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = packed["codes"]
        small = codes.numel() <= LARGE or codes.dim() != 2
        if small or codes.device.type != "cpu" or torch.compiler.is_compiling():
            return self.values(packed).to(dtype)
        # A large weight goes faster in pieces that a cache holds, and takes no float32 of its whole size on the way.
        rows, step = len(codes), max(1, LARGE // codes.shape[1])
        out = torch.empty(rows, codes.shape[1] * 8 // self.bits, dtype=dtype)
        for first in range(0, rows, step):
            out[first : first + step] = self.values({name: part[first : first + step] for name, part in packed.items()})
        return out

    def values(self, packed: Packed) -> Tensor:
        """All of a packed weight, or of some of its rows, in float32."""
        codes, scales = spread(packed["codes"], self.bits), packed["scales"]
        return Grouped(codes, scales, packed.get("minima"), self.bits, codes.shape[-1] // scales.shape[-1]).dense()

    def fake(self, weight: Tensor) -> Tensor:
        rounded = self.unpack(self.pack(weight.detach()), weight.dtype)
        return weight + (rounded - weight).detach()

    def take(self, grouped: Grouped) -> Packed | None:
        """Exactly these codes and scales, or None where bits, group or minimum are not this format's."""
        width = grouped.codes.shape[-1]
        same = grouped.bits == self.bits and (grouped.minima is not None) == self.has_minimum
        if not same or grouped.group != self._asked_group(width) or width % grouped.group:
            return None
        return self.keep(grouped)

    def keep(self, grouped: Grouped) -> Packed:
        """The packed tensors of codes that are known to fit."""
        packed = {"codes": squeeze(grouped.codes, self.bits), "scales": grouped.scales}
        return packed if grouped.minima is None else {**packed, "minima": grouped.minima}

    def grouped(self, packed: Packed, shape: tuple[int, ...]) -> Grouped:
        """The inverse of `take`; `NotLowered` where scales are no half-precision numbers."""
        minima = exact_half(packed["minima"]) if self.has_minimum else None
        codes = spread(packed["codes"], self.bits)
        return Grouped(codes, exact_half(packed["scales"]), minima, self.bits, self.group(shape[-1]))

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        grouped = self.grouped(packed, shape)
        return native_codes(cut_rows(grouped, shape[-1]) if self.config.group is None else grouped)

    def _asked_group(self, width: int) -> int:
        return width if self.config.group is None else int(self.config.group)


# Half precision -------------------------------------------------------------------------------------------------------


def as_half(values: Tensor) -> Tensor:
    """Rounded to half precision; what is too large for it becomes the largest it has. Not-a-number stays."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).half()


def finite_or_nan(values: Tensor) -> Tensor:
    """Infinities become not-a-number: a broken weight must show, and not turn into a large one."""
    return values.masked_fill(values.isinf(), torch.nan)


def exact_half(scales: Tensor) -> Tensor:
    """Scales as half precision, refused when that would change them."""
    half = scales.half()
    if not torch.equal(half.to(scales.dtype), scales):
        raise NotLowered("its scales are no half-precision numbers", hint="pack it with half-precision scales")
    return half


# What counts -----------------------------------------------------------------------------------------------------------


def counted(importance: Tensor, weight: Tensor) -> Tensor:
    """How much the square of each value's error counts, in the weight's shape; zeros are allowed, nonsense is refused."""
    try:
        counts = importance.detach().to(weight.device, torch.float32).expand(weight.shape)
    except RuntimeError:
        shapes = f"{tuple(importance.shape)} for a weight of shape {tuple(weight.shape)}"
        raise ConfigError(f"an importance of shape {shapes}", hint="give a shape that broadcasts to it") from None
    if not (counts.isfinite() & (counts >= 0)).all():
        raise ConfigError(
            "an importance is negative or not finite", hint="look for not-a-number in what it was made of"
        )
    return counts


# Several codes in a byte ----------------------------------------------------------------------------------------------


def squeeze(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n], one to a byte, as [..., n · bits / 8]: neighbours share a byte, the first in its lowest bits."""
    parts = codes.unflatten(-1, (-1, 8 // bits)).unbind(-1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        packed = packed | part << (bits * place)
    return packed


def spread(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `squeeze`."""
    if bits == 4 and sys.byteorder == "little":  # two halves of a byte go to two bytes at once
        both = packed.to(torch.int16, memory_format=torch.contiguous_format)
        return (both | both << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def nearest(values: Tensor, scales: Tensor, zero: float, bits: int) -> Tensor:
    """The code of the level nearest to each value [..., groups, group]; that of zero where the scale is zero."""
    return _levels(values.detach(), scales, zero, bits).nan_to_num(nan=0.0).to(torch.uint8)


def _levels(values: Tensor, scales: Tensor, zero: float, bits: int) -> Tensor:
    """Codes as whole floating-point numbers."""
    inverse = scales.float().reciprocal().masked_fill(scales == 0, 0.0)
    return (values * inverse[..., None]).add_(zero).round_().clamp_(0, 2**bits - 1)


def search(values: Tensor, *, zero: float, bits: int, cuts: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Codes and scales of values [..., groups, group]. Of the scales that put the value furthest from zero `cut` steps
    below zero, the one with the least squared error is taken. Such a scale may be negative: codes reach one step
    further down than up, and the furthest value deserves that step."""
    values = finite_or_nan(values.detach())
    rows = values.flatten(0, -2)
    # Many passes over the same values: on a processor they go faster in pieces that its cache holds.
    whole = rows.is_cuda or torch.compiler.is_compiling()
    pieces = (rows,) if whole else rows.split(max(1, PIECE // rows.shape[-1]))
    scales = torch.cat([_best_scales(piece, zero, bits, cuts) for piece in pieces]).reshape(values.shape[:-1])
    return nearest(values, scales, zero, bits), scales


def _best_scales(values: Tensor, zero: float, bits: int, cuts: tuple[float, ...]) -> Tensor:
    furthest = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
    candidates = as_half(torch.stack([furthest / -cut for cut in cuts]))
    errors = []
    for scales in candidates:
        levels = _levels(values, scales, zero, bits)
        off = levels.sub_(zero).mul_(scales.float()[..., None]).sub_(values)
        errors.append(off.square_().sum(-1))
    best = torch.stack(errors).argmin(0, keepdim=True)
    return candidates.gather(0, best).squeeze(0)


# The native engine's layout -------------------------------------------------------------------------------------------


def cut_rows(grouped: Grouped, width: int) -> Grouped:
    """The same values with one scale a row said once for each of the engine's groups. The engine quantises activations by
    group, and a group as long as a row would cost accuracy."""
    if width % NATIVE_GROUP:
        raise NotLowered(f"rows of {width} are no multiple of {NATIVE_GROUP}")
    # Beside few bits a scale weighs much: longer groups, as the formats of few bits have anyway.
    size = 2 * NATIVE_GROUP if grouped.bits < 8 and width % (2 * NATIVE_GROUP) == 0 else NATIVE_GROUP
    scales = grouped.scales.repeat_interleave(width // size, -1)
    minima = None if grouped.minima is None else grouped.minima.repeat_interleave(width // size, -1)
    return replace(grouped, scales=scales, minima=minima, group=size)


def native_codes(grouped: Grouped) -> NativeWeight:
    """Codes in the native layout."""
    if grouped.group % NATIVE_GROUP:
        raise NotLowered(f"groups of {grouped.group} are no multiple of {NATIVE_GROUP}")
    bits, group = grouped.bits, grouped.group
    codes, scales = _matrices(grouped.codes), _matrices(grouped.scales)
    minima = None if grouped.minima is None else _matrices(grouped.minima)

    def pack(i: int) -> np.ndarray:
        return pack_codes(codes[i], scales[i], None if minima is None else minima[i], bits=bits, group=group)

    data = _one_after_another(len(codes), pack)
    return NativeWeight(f"q{bits}", group, minima is not None, codes.shape[1], codes.shape[2], len(codes), data)


def native_plain(weight: Tensor, kind: str) -> NativeWeight:
    """A dense weight in the native layout: `kind` f32 or bf16."""
    if kind == "bf16" and weight.dtype == torch.bfloat16:
        matrices = _matrices(weight.detach().view(torch.int16)).view(np.uint16)
    else:
        matrices = _matrices(weight.float())
    data = _one_after_another(len(matrices), lambda i: pack_plain(matrices[i], kind))
    return NativeWeight(kind, 1, False, matrices.shape[1], matrices.shape[2], len(matrices), data)


def _matrices(tensor: Tensor) -> np.ndarray:
    """[..., rows, cols] as [count, rows, cols] in numpy."""
    array: np.ndarray = tensor.detach().reshape(-1, *tensor.shape[-2:]).cpu().contiguous().numpy()
    return array


def _one_after_another(count: int, pack: Callable[[int], np.ndarray]) -> np.ndarray:
    """All experts in one piece of memory, which begins where the engine can load from, as that of a single one does."""
    first = pack(0)
    if count == 1:
        return first
    room = np.empty(first.size * count + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    data = room[start : start + first.size * count]
    for i in range(count):
        data[i * first.size : (i + 1) * first.size] = first if i == 0 else pack(i)
    return data
