"""One linear map for each group of rows: what a mixture's experts multiply with.

x [P, in] is sorted by group: the first `counts[0]` rows belong to group 0, the next `counts[1]` to group 1, and so on. The weight
is [E, out, in]. On a processor a kernel of our own does it, which reads float32 and bfloat16 weights as they lie; it is several
times faster than a product a group where groups are small, and to the last bit a row's result does not depend on the other rows.
On a GPU, and where a model is compiled, it is torch's grouped product. `grouped_loop` is the plain twin of both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from orchard.core.errors import ConfigError
from orchard.ops.kernels import native

ALIGNED = 16
"""Bytes: torch's grouped product takes rows of whole multiples of this."""
KERNEL_TYPES = (torch.float32, torch.bfloat16)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[P, in] → [P, out] in the dtype of x, or in that of autocast."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if torch.compiler.is_compiling() and not (x.is_cuda and x.dtype == torch.bfloat16):
        seen: Tensor = _opaque(x, weight, counts)
        return seen
    if _kernel_fits(x, weight):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            out: Tensor = _Kernel.apply(x, weight, counts)
            return out
        return _kernel(x, weight, counts)
    weight = weight.to(x.dtype)
    return torch_grouped(x, weight.mT, counts) if _torch_fits(x, weight) else grouped_loop(x, weight, counts)


def grouped_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, group by group."""
    rows = x.split(counts.tolist())
    return torch.cat([nn.functional.linear(part, weight[group].to(x.dtype)) for group, part in enumerate(rows)])


def torch_grouped(x: Tensor, maps: Tensor, counts: Tensor) -> Tensor:
    """torch's own: rows [P, in] with maps [E, in, out]; or columns [in, P] with rows [P, out] to products [E, in, out]."""
    made: Tensor = torch._grouped_mm(x, maps, counts.cumsum(0).to(torch.int32))
    if made.requires_grad and not torch.compiler.is_compiling():
        made.register_hook(Tensor.contiguous)  # its own gradient refuses slopes that are one number spread out
    return made


def _torch_fits(x: Tensor, weight: Tensor) -> bool:
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(width * x.element_size() % ALIGNED == 0 for width in weight.shape[1:])
    there = hasattr(torch, "_grouped_mm") and len(x) > 0 and x.dtype in kinds and weight.is_contiguous()
    return there and aligned and not _watched()


# The kernel -----------------------------------------------------------------------------------------------------------


def _kernel_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel may be called: on plain tensors in memory that hold what it reads, with nobody watching."""
    if x.device.type != "cpu" or not len(x):
        return False
    kinds = x.dtype in KERNEL_TYPES and weight.dtype in (torch.bfloat16, x.dtype)
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in (x, weight)) and weight.is_contiguous()
    return kinds and plain and not _watched() and _library() is not None


def _watched() -> bool:
    """Whether derivatives are being taken forwards, or a function mapped: that only plain operations can."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _kernel(x: Tensor, weight: Tensor, counts: Tensor, level: int = -1, threads: int | None = None) -> Tensor:
    call: Any = _library()
    rows, counts = x.detach().float().contiguous(), counts.to("cpu", torch.int64).contiguous()
    groups, out, width = weight.shape
    if counts.shape != (groups,) or rows.shape[1] != width or int(counts.sum()) != len(rows) or int(counts.min()) < 0:
        raise ConfigError(
            f"rows of shape {tuple(rows.shape)}, counted as {counts.tolist()[:8]}, for a weight of {tuple(weight.shape)}",
            hint="give one count a group, which add up to the rows",
        )
    made = torch.empty(len(rows), out)
    call(
        level,
        rows.data_ptr(),
        weight.data_ptr(),
        int(weight.dtype == torch.bfloat16),
        counts.data_ptr(),
        groups,
        out,
        width,
        threads or torch.get_num_threads(),
        made.data_ptr(),
    )
    return made.to(x.dtype)


class _Kernel(torch.autograd.Function):
    """The kernel forward, torch backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _kernel(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_rows, of_weight = _back(gradients[0], *ctx.saved_tensors)
        needs = ctx.needs_input_grad
        return of_rows() if needs[0] else None, of_weight() if needs[1] else None, None


def _back(
    slope: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """How gradients are computed: those of the rows, and those of the weight. Sums are float32."""
    slope, rows, maps = slope.float().contiguous(), x.float().contiguous(), weight.float()
    if _torch_fits(slope, maps):
        return (
            lambda: torch_grouped(slope, maps, counts).to(x.dtype),
            lambda: torch_grouped(slope.mT, rows, counts).to(weight.dtype),
        )
    pieces = list(zip(slope.split(counts.tolist()), rows.split(counts.tolist()), maps, strict=True))
    return (
        lambda: torch.cat([part @ one for part, _, one in pieces]).to(x.dtype),
        lambda: torch.stack([part.mT @ read for part, read, _ in pieces]).to(weight.dtype),
    )


# Where a model is compiled, the compiler sees one operation. (It knows torch's own for bfloat16 alone.) -------------------


@torch.library.custom_op("orchard::grouped_linear", mutates_args=())
def _opaque(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_linear(x, weight, counts).contiguous()


@torch.library.custom_op("orchard::grouped_linear_back", mutates_args=())
def _opaque_back(slope: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_weight = _back(slope, x, weight, counts)
    return of_rows().contiguous(), of_weight().contiguous()


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_opaque_back.register_fake
def _(slope: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _opaque_slopes(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_opaque_back(slope, *ctx.saved_tensors), None)


_opaque.register_autograd(_opaque_slopes, setup_context=_remember)


def _library() -> Any:
    """The kernel, where it was built."""
    found = native.library()
    return None if found is None else _bound(found)


@cache
def _bound(library: ctypes.CDLL) -> Any:
    call = getattr(library, "orchard_grouped", None)  # a library of older sources has none, and is otherwise good
    if call is not None:
        whole, address = ctypes.c_int, ctypes.c_void_p
        call.argtypes = [whole, address, address, whole, address, whole, whole, whole, whole, address]
        call.restype = None
    return call
