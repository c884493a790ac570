"""The models of `rattention`, how they learn, and what is measured of them.

All have the same widths, begin from the same numbers where they have the same tensors, and read the same documents for the same
number of steps. Queries and keys are normalised in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, RAttention, Rotary
from orchard.nn.linear import Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.objectives.lm import NextToken
from orchard.studies._afm_ground import device
from orchard.studies._rattention_facts import Facts, told
from orchard.train.clip import Clip
from orchard.train.optim import Muon
from orchard.train.schedule import Cosine
from orchard.train.step import Step
from orchard.transforms.local_global import LocalGlobal

LONGER = 4
"""How many times longer than what was learnt from the long documents are."""
WIDE = 8
"""How many times wider the wide window is."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is. `window` is w: a query sees w tokens before it, and itself."""

    dim: int = 32
    layers: int = 4
    heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    window: int = 4
    length: int = 64
    rows: int = 16
    steps: int = 650
    rate: float = 2e-2
    letters: int = 6
    hops: int = 2
    held_out: int = 128
    """Documents that everything is measured on; of long ones a quarter as many."""

    def facts(self, hops: int | None = None) -> Facts:
        return Facts(letters=self.letters, window=self.window, hops=self.hops if hops is None else hops)


def tree(size: Size, vocab: int) -> Decoder.Config:
    """Every layer sees everything, with rotary positions."""
    mixer = Attention.Config(
        heads=size.heads,
        kv_heads=size.heads,
        head_dim=size.head_dim,
        q_norm=RMSNorm.Config(),
        k_norm=RMSNorm.Config(),
        rotary=Rotary.Config(),
    )
    block = Block.Config(mixer=mixer, mlp=GatedMLP.Config(hidden_dim=size.hidden))
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    return Decoder.Config(vocab=vocab, dim=size.dim, context=LONGER * size.length, stack=stack, head=None).complete()


def framed(size: Size, vocab: int) -> dict[str, Decoder.Config]:
    """One layer of four global and without positions, the others local; and the model whose layers all see everything."""
    whole = tree(size, vocab)
    narrow, wide = size.window + 1, WIDE * size.window + 1
    return {
        "full": whole,
        "window": LocalGlobal(window=narrow)(whole),
        "rattention": LocalGlobal(window=narrow, mixer="rattention")(whole),
        "wide window": LocalGlobal(window=wide)(whole),
    }


def local_only(size: Size, vocab: int) -> dict[str, Decoder.Config]:
    """No layer sees everything."""
    frames = framed(size, vocab)
    made = {}
    for name in ("window", "rattention"):
        config = frames[name].clone()
        first: Any = config.stack.layers[0]
        for layer in config.stack.layers:
            layer.mixer = first.mixer.clone()  # type: ignore[misc]
        made[name] = config.complete()
    return made


def built(config: BaseConfig, seed: int) -> Decoder:
    """A fresh model. Linear maps begin as large as keeps activations even, or narrow models stay on a plateau for long; those
    that lead back into the stream begin smaller, by how many of them add up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights"))
        model: Decoder = config.build()
        for name, part in sorted(model.named_modules()):
            if isinstance(part, Weight):
                torch.manual_seed(fold(seed, "weights", name))
                back = name.endswith((".o", ".down"))
                std = (part.shape[-1] * (2 * len(model.stack.layers) if back else 1)) ** -0.5
                part.assign(torch.empty(part.shape).normal_(std=std))
    return model.to(device())


def trained(config: BaseConfig, size: Size, facts: Facts, seed: int, title: str) -> Decoder:
    """Muon, which finds out about far facts in fewer steps than AdamW in all of these models; a cosine, clipped at 1."""
    model = built(config, seed)
    optimizer = Muon.Config(lr=size.rate, decay=0.01).build(named_parameters=list(model.named_parameters()))
    schedule = Cosine.Config(warmup=max(1, size.steps // 20), steps=size.steps, floor=0.05).build()
    dtype = "bfloat16" if device().type == "cuda" else "float32"
    clip, objective = Clip.Config().build(), NextToken.Config().build()
    step = Step(model, objective, optimizer, schedule, clip, micro=None, dtype=dtype, seed=seed)
    with progress(title, total=size.steps, unit="steps") as advance:
        for number in range(size.steps):
            batch = told(facts, size.rows, size.length, seed, number).batch
            advance(note=f"loss {step(batch, number, tokens=batch.tokens).loss:.3f}")
    return model.eval()


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Of held-out documents."""

    loss: float
    """Nats a symbol."""
    right: dict[int, float]
    """Of answers that were told before, the share that is found, by steps."""
    far: float
    """The same of answers in one step that were told further back than all windows together reach."""
    count: int
    """How many of those there are."""


@torch.no_grad()
def measure(model: Decoder, size: Size, facts: Facts, seed: int, *, longer: int = 1) -> Measured:
    model.eval()
    rows = size.held_out if longer == 1 else max(1, size.held_out // LONGER)
    loss: list[float] = []
    found: list[np.ndarray] = []
    read = told(facts, rows, longer * size.length, seed, f"held out {longer}")
    for start in range(0, rows, 32):
        batch = read.batch.part(start, min(start + 32, rows))
        scores = model(batch.ids).float()
        each = functional.cross_entropy(scores.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        loss.append(float(each))
        found.append((scores.argmax(-1) == batch.targets).cpu().numpy())
    right = np.concatenate(found)
    far = (read.steps == 1) & (read.back > size.layers * size.window)
    by_steps = {hops: _share(right, read.steps == hops) for hops in range(1, facts.hops + 1)}
    return Measured(sum(loss) / read.steps.size, by_steps, _share(right, far), int(far.sum()))


def _share(right: np.ndarray, of: np.ndarray) -> float:
    return float(right[of].mean()) if of.any() else float("nan")


@torch.no_grad()
def difference(model: Decoder, size: Size, seed: int) -> float:
    """The largest of any score between all pairs of tokens, pieces, and token by token with stores, over long documents."""
    model.eval()
    ids: Tensor = told(size.facts(), 2, LONGER * size.length, seed, "forms").batch.ids
    pairs, pieces = (_with_chunk(model, chunk)(ids) for chunk in (None, 32))
    cache, steps = model.cache(batch=2, length=ids.shape[1]), []
    for place in range(ids.shape[1]):
        positions = torch.full((2, 1), place, device=ids.device)
        steps.append(model(ids[:, place : place + 1], Context(positions, cache=cache)))
    recurrent = torch.cat(steps, 1)
    return max(float((one - pairs).abs().max()) for one in (pieces, recurrent))


def _with_chunk(model: Decoder, chunk: int | None) -> Decoder:
    """The same model with another way to compute the same."""
    made: Decoder = model.config.rewrite(RAttention, lambda node: node.clone(chunk=chunk)).build()
    made.load_state_dict(model.state_dict())
    return made.to(device()).eval()


def local_bytes(config: Decoder.Config, length: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that the stores of the local layers take for one sequence."""
    with torch.device("meta"):
        model: nn.Module = config.build()
        cache = model.to(dtype).cache(batch=1, length=length)  # type: ignore[operator]
    layers = [layer for layer, block in enumerate(config.stack.layers) if block.mixer.window is not None]
    return sum(cache.stores[layer].nbytes for layer in layers)


def as_in_the_note(size: Size) -> Size:
    """The shape whose stores are counted, whatever is trained: windows of 16 and 128."""
    return replace(size, dim=128, layers=8, heads=8, head_dim=16, hidden=384, window=16, length=512)
