"""What the layers of a model keep on some texts: unrotated keys and values, and how much queries look at each channel.

For whoever fits how keys and values are coded. All layers are seen in one pass over the texts; of each a limited number of tokens
is kept, drawn alike for all layers. The first tokens of sequences are left out: their keys and values are unlike all others, and
are kept as they are.

Shapes: H key/value heads, N tokens, D head width, P = D/2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.context import Context, KVView, Rotate
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.nn.attention.attention import Attention
from orchard.transforms.base import Tell, silent

WANTED = 64
"""Tokens of a row that go through the whole model: nobody wants scores, but somebody must look at the last layer's keys."""


@dataclass
class Samples:
    """Of one layer."""

    k: Tensor  # [H, N, D]
    v: Tensor  # [H, N, D]
    looks: Tensor
    """[H, P]: the mean square of queries, by pair of channels."""

    def to(self, device: torch.device) -> Samples:
        return Samples(self.k.to(device), self.v.to(device), self.looks.to(device))


@dataclass
class _Seen:
    """A cache that keeps nothing for the model and something for us."""

    chosen: Tensor
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    looks: dict[int, list[Tensor]] = field(default_factory=dict)

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        plain = Context(positions=context.positions, documents=context.documents, causal=context.causal)
        heads = k.shape[1]
        for side, x in ((self.k, k), (self.v, v)):
            # To half at once: a model of 30 layers keeps much of a few thousand tokens.
            side[layer] = x.transpose(1, 2)[self.chosen].transpose(0, 1).half().cpu()

        def watch(q: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> None:
            squares = q.float().unflatten(1, (heads, -1)).square().mean((0, 2, 3))
            real, imaginary = squares.chunk(2, dim=-1)
            self.looks.setdefault(layer, []).append((real + imaginary).cpu())

        return replace(plain.append(layer, k, v, rotate), watch=watch)


@torch.no_grad()
def samples_of(
    model: Any, texts: Sequence[Batch], *, tokens: int, skip: int, who: str, seed: int = 0, tell: Tell = silent
) -> dict[int, Samples]:
    """By layer that keeps its own: at most `tokens` tokens of the texts, none of the first `skip` of a row."""
    if not texts or not sum(len(batch) for batch in texts):
        raise UsageError(f"{who} looks at texts, and there are none", hint="give it some thousand tokens")
    training = model.training
    model.eval()
    found: list[_Seen] = []
    dice = torch.Generator().manual_seed(seed)
    real = sum(int((torch.as_tensor(batch.positions) >= skip).sum()) for batch in texts)
    try:
        for number, batch in enumerate(texts):
            batch = batch.to(model.device)
            wanted = torch.rand(batch.positions.shape, generator=dice) < tokens / max(real, 1)
            chosen = (batch.positions >= skip) & wanted.to(model.device)
            documents = None if batch.plain else batch.documents
            seen = _Seen(chosen)
            context = Context(batch.positions, cache=seen, documents=documents, causal=batch.plain, wanted=WANTED)
            model(batch.ids, context)
            found.append(seen)
            tell((number + 1) / len(texts))
    finally:
        model.train(training)
    made = {}
    for layer in found[0].k:
        k, v = (torch.cat([getattr(seen, side)[layer] for seen in found], dim=1).float() for side in ("k", "v"))
        if k.shape[1] < 2:
            raise UsageError(f"{who} looks at texts longer than {skip} tokens", hint="give it some thousand tokens")
        if not bool(k.isfinite().all() and v.isfinite().all()):
            raise ConfigError(f"layer {layer} keeps numbers that are not finite", hint="look at the model's weights")
        made[layer] = Samples(k, v, torch.stack([each for seen in found for each in seen.looks[layer]]).mean(0))
    return made


def keeping(tree: Any, who: str) -> dict[int, Any]:
    """The attentions of a completed tree that keep keys and values of their own, by layer."""
    made: dict[int, Any] = {}
    for _, mixer in tree.find(Attention):
        if mixer.store.owner is not None:
            continue
        if mixer.layer in made:
            raise UnsupportedPair(
                f"layer {mixer.layer} is made of tracks, each of which keeps keys and values of its own",
                hint=f"use {who} only in models without tracks",
            )
        if mixer.head_dim % 2:
            raise UnsupportedPair(f"heads of {mixer.head_dim} channels have no pairs", hint=f"leave {who} out")
        made[mixer.layer] = mixer
    if not made:
        raise ConfigError("this model keeps no keys and values", hint=f"leave {who} out of the plan")
    return made


def fingerprint(model: Any) -> str:
    """Tells a model from another by the maps that make its keys and values, whatever format or type they are in."""
    found = sha256()
    for path, part in sorted(model.named_modules()):
        if isinstance(part, Attention):
            for name in ("k", "v"):
                linear = getattr(part, name)
                if linear is not None:
                    weight = linear.dense(torch.float32).detach().to(torch.bfloat16).cpu().contiguous()
                    found.update(f"{path}.{name}".encode() + weight.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]
