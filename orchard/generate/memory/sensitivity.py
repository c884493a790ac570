"""How much each layer minds that old tokens are gone, and budgets to go with it (EpiCache, arXiv 2509.17396).

One text is read twice: once with everything in sight, once as block by block reading shows it, where only the first and the
newest tokens are seen. Where the keys of a layer come out differently it minds, and gets more of the budget. A layer's share
goes with a power of 1 - cosine; none falls below a floor, and what the floor takes is taken from the others, so the sum stays
what it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orchard.core.context import Context, KVView, Rotate
from orchard.core.errors import UsageError
from orchard.generate.torch_forward import TorchModel


class _Recorder:
    """A cache that keeps nothing but a copy of the keys, and shows each token itself, the first and the newest before it."""

    def __init__(self, window: int | None, sinks: int) -> None:
        self.keys: dict[int, Tensor] = {}
        self.window, self.sinks = window, sinks

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        self.keys[layer] = k[0].float()  # turning both runs' keys alike would not change their cosine
        k = rotate(k, context.places) if rotate is not None else k
        return KVView(k, v, context.places, context.valid, window=self.window, sinks=self.sinks, key="new")


@torch.inference_mode()
def drift(model: TorchModel, tokens: Sequence[int], *, window: int, sinks: int) -> list[float]:
    """1 - the mean cosine between a layer's keys with all tokens in sight and with the first `sinks` and the newest `window`, for
    each layer that has a store. One text of a few windows is enough."""
    if window < 1 or len(tokens) <= window + sinks:
        raise UsageError(
            f"{len(tokens)} tokens in a window of {window} with {sinks} sinks: everything is seen",
            hint="use a longer text or a smaller window",
        )
    ids = torch.tensor([list(tokens)], device=model.device)
    places = torch.arange(ids.shape[1], device=model.device)[None]
    seen = []
    for size in (None, window):
        cache = _Recorder(size, sinks)
        model.hidden(ids, Context(places, cache=cache))
        seen.append(cache.keys)
    whole, cut = seen
    return [
        1 - float(torch.cosine_similarity(whole[layer], cut[layer], dim=-1).mean().clamp(max=1.0))
        for layer in sorted(whole)
    ]


def layer_budgets(
    drifts: Sequence[float], budget: int, *, alpha: float = 2.0, floor: float = 0.25, least: int = 1
) -> list[int]:
    """Tokens for each layer: budget × layers in all, shared out by drift to the power `alpha`; none gets less than
    `floor` × budget, nor less than `least`."""
    layers = len(drifts)
    low = max(math.ceil(floor * budget), least)
    if not layers or any(not math.isfinite(one) for one in drifts):
        raise UsageError(f"drifts {list(drifts)} say nothing", hint="give one finite number a layer")
    if not 0 <= floor <= 1 or low > budget:
        raise UsageError(
            f"no layer can have {low} of {budget} tokens", hint="use a floor of 0 to 1, or a larger budget"
        )
    worth = [max(one, 0.0) ** alpha for one in drifts]
    if sum(worth) <= 0:
        return [budget] * layers
    total, low_layers = layers * budget, set[int]()
    while True:
        # Layers at the floor take what they take; the others share the rest, which may bring more of them to the floor.
        rest = total - low * len(low_layers)
        weight = sum(worth[layer] for layer in range(layers) if layer not in low_layers)
        exact = [low if layer in low_layers else rest * worth[layer] / weight for layer in range(layers)]
        below = {layer for layer in range(layers) if layer not in low_layers and exact[layer] < low}
        if not below:
            break
        low_layers |= below
    made = [math.floor(one) for one in exact]
    left = sorted(range(layers), key=lambda layer: (made[layer] - exact[layer], layer))
    for layer in left[: total - sum(made)]:
        made[layer] += 1
    return made
