"""Scores of many tokens against a large vocabulary, some tokens at a time.

Scores in float32 are the largest thing a small model makes (8192 tokens × 49152 words: 1.6 GB, and as much again for their
gradient), and nothing needs them all at once. Two ways to have only a chunk of them, both with the value and gradient of the
plain way:

- `recompute`: a chunk's scores are let go after the forward pass and made again in the backward pass (torch's checkpointing).
  Works for whatever comes after the chunks, and for parameters that live in shards.
- at once: where all that comes out is a sum, its gradient is known up to one factor as soon as the chunk is scored. It is taken
  there and then, and the backward pass only multiplies. Nothing is computed twice. The gradients of the head's parameters
  wait in float32 until the graph is let go of; second derivatives are refused by autograd. Float16 cannot go this way: its small
  gradients need the factor that comes with the backward pass before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Sums = dict[str, Tensor]
Score = Callable[[Tensor], Tensor]
Measure = Callable[..., Sums]
"""`(scores [n, V], *inputs [n, …]) → sums`; only the sum called "value" is differentiated."""
Slope = Callable[..., tuple[Sums, Tensor]]
"""The same, and the gradient of "value" for the scores [n, V]; it may be made in their place."""
ON_GPU = 8
"""How many times as many tokens a GPU takes at once: small pieces would keep it waiting for the CPU."""


def chunked_sums(
    model: Any,
    hidden: Tensor,
    inputs: Sequence[Tensor],
    measure: Measure,
    *,
    chunk: int | None,
    recompute: bool | None,
    slope: Slope | None = None,
) -> Sums:
    """Add up what `measure` says of each chunk of the tokens `hidden` [N, dim] and of `inputs` [N, …].

    `chunk` None: all tokens together. `recompute` None: where a model's parameters are sharded, or in float16. `slope`: `measure`
    with its gradient, where that can be had for less than by autograd.
    """
    size = max(len(hidden), 1) if chunk is None else chunk * ON_GPU if hidden.is_cuda else chunk
    learns = torch.is_grad_enabled()
    if len(hidden) <= size and not (learns and slope is not None and recompute is not True):
        return measure(model.scores(hidden), *inputs)
    if not learns:
        return _add([measure(model.scores(h), *rest) for h, *rest in _pieces([hidden, *inputs], size)])
    parameters = _trained(model)
    if recompute is None:
        sharded = any(hasattr(parameter, "placements") for parameter in parameters or ())
        recompute = sharded or hidden.dtype == torch.float16
    if not recompute and parameters is not None and len(hidden):
        names: list[str] = []
        values = _AtOnce.apply(model.scores, measure, slope, size, names, list(inputs), hidden, *parameters)
        return dict(zip(names, values, strict=True))
    if len(hidden) <= size:
        return measure(model.scores(hidden), *inputs)

    def piece(h: Tensor, *rest: Tensor) -> Sums:
        return measure(model.scores(h), *rest)

    return _add([_again(piece, h, *rest) for h, *rest in _pieces([hidden, *inputs], size)])


def chunked_map(
    model: Any, hidden: Tensor, inputs: Sequence[Tensor], fn: Callable[..., Tensor], *, chunk: int | None
) -> Tensor:
    """`fn(scores [n, V], *inputs)` → values [n], for all tokens: [N]. Scores are made again in the backward pass."""
    if chunk is None or len(hidden) <= chunk:
        return fn(model.scores(hidden), *inputs)

    def piece(h: Tensor, *rest: Tensor) -> Tensor:
        return fn(model.scores(h), *rest)

    run = _again if torch.is_grad_enabled() else lambda call, *tensors: call(*tensors)
    return torch.cat([run(piece, h, *rest) for h, *rest in _pieces([hidden, *inputs], chunk)])


def _again(call: Callable[..., Any], *tensors: Tensor) -> Any:
    return checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=False)


def _pieces(tensors: Sequence[Tensor], chunk: int) -> Iterator[tuple[Tensor, ...]]:
    # Splitting, unlike slicing, gives back one gradient of full size and not one for every piece.
    return zip(*(tensor.split(chunk) for tensor in tensors), strict=True)


def _add(pieces: Sequence[Sums]) -> Sums:
    return {name: torch.stack([piece[name] for piece in pieces]).sum(0) for name in pieces[0]}


def _trained(model: Any) -> list[Tensor] | None:
    """The parameters that are trained; None where a model does not say."""
    parameters = getattr(model, "parameters", None)
    return None if parameters is None else [parameter for parameter in parameters() if parameter.requires_grad]


class _AtOnce(torch.autograd.Function):
    """The sums of all chunks, with the gradient of "value" taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Score,
        measure: Measure,
        slope: Slope | None,
        chunk: int,
        names: list[str],
        inputs: list[Tensor],
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden, *parameters = leaves
        used = [parameter for parameter in parameters if parameter.requires_grad]
        totals: list[Tensor | None] = [None] * len(used)
        sums, slope_of_hidden = [], torch.zeros_like(hidden)  # made once: small pieces would scatter over the heap
        for h, into, *rest in _pieces([hidden, slope_of_hidden, *inputs], chunk):
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                out = scores(h)
                if slope is None:
                    found, down = measure(out, *rest), None
                    out = found["value"]
                else:
                    found, down = slope(out.detach(), *rest)
                first, *others = torch.autograd.grad(out, [h, *used], down, allow_unused=True)
            sums.append({name: value.detach() for name, value in found.items()})
            if first is not None:
                into.copy_(first)
            for at, other in enumerate(others):
                total = totals[at]
                if other is None:
                    continue
                if total is None:  # the first is cloned where it is not cast: autograd may have lent it
                    totals[at] = other.float() if other.dtype in (torch.bfloat16, torch.float16) else other.clone()
                else:
                    total += other
        added = _add(sums)
        names[:] = added
        ctx.slope = slope_of_hidden
        by_parameter = dict(zip(map(id, used), totals))
        ctx.totals = [by_parameter.get(id(parameter)) for parameter in parameters]
        ctx.kinds = [parameter.dtype for parameter in parameters]
        ctx.value_at = names.index("value")
        ctx.mark_non_differentiable(*(value for name, value in added.items() if name != "value"))
        return tuple(added.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        factor = gradients[ctx.value_at]
        slopes = [None if total is None else (total * factor).to(kind) for total, kind in zip(ctx.totals, ctx.kinds)]
        slope = ctx.slope * factor.to(ctx.slope.dtype)
        return None, None, None, None, None, None, slope, *slopes
