"""The models of `commvq`: a small one trained here, and SmolLM2 where it is at hand; and losses with keys and values coded.

A loss is measured by reading rows of text through stores with the codec under test, all tokens of a row at once: every token is
seen as it is kept, also by the tokens that are read with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.context import Context, KVView, Rotate
from orchard.core.machine import CHECKOUT
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.studies._afm_ground import Ground, base, batches, device
from orchard.studies._afm_text import VOCAB
from orchard.studies._commvq_codes import Coder

HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    dim: int = 128
    layers: int = 4
    steps: int = 300
    rows: int = 16
    length: int = 128
    rate: float = 4e-3
    fitted: int = 12_000
    """Tokens that codes are fitted to, of text that nobody else reads."""
    measured: int = 64
    """Rows of text that losses are measured on."""


def ground(size: Size) -> Ground:
    return Ground(
        dim=size.dim, layers=size.layers, rows=size.rows, length=size.length, steps=size.steps, rate=size.rate
    )


def trained(size: Size, seed: int) -> Decoder:
    """Llama-shaped, two heads of 64 channels with keys and values of their own."""
    heads = size.dim // HEAD
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=heads, head_dim=HEAD),
        mlp=GatedMLP.Config(hidden_dim=3 * size.dim),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    tree = Decoder.Config(vocab=VOCAB, dim=size.dim, context=512, stack=stack, head=None).complete()
    return base(ground(size), seed, "the model", tree)


def texts(size: Size, seed: int, name: str, rows: int) -> list[Batch]:
    return list(batches(ground(size), -(-rows // size.rows), seed, name))


# Losses ---------------------------------------------------------------------------------------------------------------


class Coded:
    """A cache that keeps nothing and shows what coders make of unrotated keys and values, but for the first tokens."""

    def __init__(self, coders: dict[int, tuple[Coder, Coder]], sinks: int) -> None:
        self.coders, self.sinks = coders, sinks

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        made = []
        for x, coder in zip((k, v), self.coders[layer], strict=True):
            coded = coder(x.float().transpose(0, 1).flatten(1, 2)).unflatten(1, (x.shape[0], -1)).transpose(0, 1)
            made.append(torch.cat([x[:, :, : self.sinks], coded[:, :, self.sinks :].to(x.dtype)], dim=2))
        plain = Context(positions=context.positions, causal=context.causal)
        return plain.append(layer, made[0], made[1], rotate)


@torch.no_grad()
def loss(model: Any, read: Sequence[Batch], *, coders: Any = None, stores: bool = False, sinks: int = 4) -> float:
    """Nats a token: as the model is, with what coders make of keys and values, or read through the model's own stores."""
    total, count = 0.0, 0
    model.eval()
    for batch in read:
        rows, length = batch.ids.shape
        if stores:
            cache: Any = model.cache(batch=rows, length=length)
            context = Context(batch.positions, cache=cache, upto=length)
        else:
            cache = None if coders is None else Coded(coders, sinks)
            context = Context(batch.positions, cache=cache, causal=True)
        scores = model(batch.ids, context).float()
        total += float(
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        )
        count += batch.targets.numel()
    return total / count


# SmolLM2 --------------------------------------------------------------------------------------------------------------


def pages(tokenizer: Any, length: int, rows: int, held: bool) -> Iterator[Batch]:
    """Rows of this project's own pages, of which one in five is held out."""
    files = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])
    chosen = [file.read_text(encoding="utf-8") for number, file in enumerate(files) if (number % 5 == 0) is held]
    ids: list[int] = []
    for text in chosen:
        ids += list(tokenizer.encode(text))
        if len(ids) > rows * length:
            break
    count = min(rows, (len(ids) - 1) // length)
    places = np.broadcast_to(np.arange(length), (1, length)).copy()
    for row in range(count):
        piece = np.array(ids[row * length : (row + 1) * length + 1], np.int64)[None]
        batch = Batch(piece[:, :-1].copy(), piece[:, 1:].copy(), places, np.zeros_like(places), plain=True, full=True)
        yield batch.to(device())
