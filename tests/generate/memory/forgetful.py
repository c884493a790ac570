"""What a sequence under a budget must compute, by the model's own modules in torch: keys and values are handed to attention as
they are kept, head by head, and what new tokens see and look at is worked out from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orchard.cache.codecs import Int8
from orchard.core.context import Context, KVView, Rotate
from orchard.generate.memory.native_kept import NativeKept
from orchard.models.language.decoder import Decoder


class Handed:
    """A cache of kept keys and values, [tokens, D] for every head of every layer that has a store; new tokens come after them."""

    def __init__(self, kept: NativeKept) -> None:
        inner = kept._kept
        stores = inner.program.plan.stores
        self.tokens = inner.tokens
        self.k = {spec.layer: inner.read(number) for number, spec in enumerate(stores)}
        self.v = {spec.layer: inner.read(number, values=True) for number, spec in enumerate(stores)}
        self.codec = {spec.layer: spec.codec for spec in stores}
        self.shares: dict[int, Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        new = context.places
        keys = self._rounded(rotate(k, new) if rotate is not None else k, layer)
        v = self._rounded(v, layer)
        before_k, before_v = (self._padded(part[layer]) for part in (self.k, self.v))
        heads = k.shape[1]
        places = torch.arange(self.tokens).expand(1, heads, -1)
        first = torch.tensor([self.tokens - len(head) for head in self.k[layer]])[None, :, None]

        def watch(q: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> None:
            self._watch(layer, q, torch.cat([before_k, keys], 2), mask, scale, softcap)

        return KVView(
            k=torch.cat([before_k, keys], 2),
            v=torch.cat([before_v, v], 2),
            positions=torch.cat([places, new.expand(1, heads, -1)], 2),
            valid=torch.cat([places >= first, torch.ones(1, heads, k.shape[2], dtype=torch.bool)], 2),
            watch=watch,
        )

    def _rounded(self, x: Tensor, layer: int) -> Tensor:
        if self.codec[layer] == "int8":
            codec = Int8.Config().build()
            return codec.decode(codec.encode(x, "k"), "k", torch.float32)
        return x.to(torch.bfloat16).float() if self.codec[layer] == "bf16" else x

    def _padded(self, parts: Sequence[np.ndarray]) -> Tensor:
        """[1, H, tokens, D]: heads that have forgotten more begin with zeros."""
        return torch.stack([torch.from_numpy(np.pad(part, ((self.tokens - len(part), 0), (0, 0)))) for part in parts])[
            None
        ]

    def _watch(
        self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None
    ) -> None:
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = grouped @ k[:, :, None].transpose(-1, -2) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        assert mask is not None
        share = scores.masked_fill(~mask[:, :, None], float("-inf")).softmax(-1)
        found = share.amax((2, 3))[0, :, : self.tokens]
        self.shares[layer] = torch.maximum(self.shares.get(layer, torch.zeros(())), found)


@torch.inference_mode()
def after(model: Decoder, kept: NativeKept, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Scores [T, V] after each of some tokens that come next; and, by head, the largest share of attention that any of them gives
    each kept token."""
    handed = Handed(kept)
    positions = torch.arange(handed.tokens, handed.tokens + len(tokens))[None]
    context = Context(positions=positions, cache=handed)
    scores = model.scores(model.hidden(torch.tensor([list(tokens)]), context))[0].float().numpy()
    shares = [
        share.numpy()[handed.tokens - len(keys) :]
        for layer in handed.k
        for share, keys in zip(handed.shares[layer], handed.k[layer], strict=True)
    ]
    return scores, shares
