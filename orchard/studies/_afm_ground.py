"""What the `afm` studies stand on: a small language model, one way to train it, one way to measure it, bytes counted exactly.

Held-out text is always the same for one seed of the study, and text that is learnt from never repeats: every use of it has
a name, and two runs that are compared are given the same name, so that they read the same rows in the same order.
"""

from __future__ import annotations

import copy
import hashlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.progress import progress
from orchard.core.report import Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.linear import Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.nn.tensors import tensor_names
from orchard.objectives.base import Objective
from orchard.objectives.distill import Distill
from orchard.objectives.lm import NextToken
from orchard.studies._afm_text import VOCAB, ids_of, language
from orchard.train.clip import Clip
from orchard.train.ema import EMA
from orchard.train.optim import AdamW, Rules
from orchard.train.schedule import Cosine
from orchard.train.step import Step

SCALES = "log_scale"
"""The last part of the name of a learned scale: it has a rate of its own and no decay."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """How large everything is."""

    dim: int = 128
    layers: int = 8
    rows: int = 16
    length: int = 128
    steps: int
    """Of the model that everything begins from."""
    rate: float = 4e-3
    held_out: int = 256
    """Rows that every loss is measured on."""

    @property
    def tokens(self) -> int:
        """What the model that everything begins from learnt from."""
        return self.steps * self.rows * self.length


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tree(ground: Ground, *, context: int = 512) -> Decoder.Config:
    """Llama-shaped, with two queries to a key and tied embeddings."""
    head_dim = 32
    heads = ground.dim // head_dim
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=max(heads // 2, 1), head_dim=head_dim),
        mlp=GatedMLP.Config(hidden_dim=3 * ground.dim),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(ground.layers)])
    return Decoder.Config(vocab=VOCAB, dim=ground.dim, context=context, stack=stack, head=None).complete()


def built(config: BaseConfig, seed: int, name: str) -> Decoder:
    """A fresh model; the same name gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights", name))
        model: Decoder = config.build()
    return model.to(device())


# Text -----------------------------------------------------------------------------------------------------------------


def batches(ground: Ground, count: int, seed: int, name: str, rows: int | None = None) -> Iterator[Batch]:
    """`count` batches of text that has this name."""
    rows = rows or ground.rows
    ids = ids_of(language().text(fold(seed, "text", name), count * rows * ground.length + 1))
    for place in range(count):
        start = place * rows * ground.length
        yield batch_of(ids[start : start + rows * ground.length + 1], rows, ground.length)


def batch_of(ids: np.ndarray, rows: int, length: int) -> Batch:
    """Characters as rows without padding, each from its beginning."""
    places = np.broadcast_to(np.arange(length), (rows, length)).copy()
    shape = (rows, length)
    return Batch(
        ids[:-1].reshape(shape).copy(),
        ids[1:].reshape(shape).copy(),
        places,
        np.zeros_like(places),
        plain=True,
        full=True,
    ).to(device())


# Learning and measuring -----------------------------------------------------------------------------------------------


def learn(
    model: Decoder,
    objective: Objective,
    read: Sequence[Batch] | Iterator[Batch],
    steps: int,
    rate: float,
    *,
    seed: int,
    title: str,
    decay: float = 0.1,
    scales: float = 1.0,
    average: float | None = None,
    floor: float = 0.05,
) -> Decoder:
    """Train what is not frozen, in place: AdamW, a cosine, clipped at 1. `scales`: the rate of learned scales, as a factor;
    `average`: the decay of an average of weights, which then is what stays."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    rules = Rules.Config(no_decay=[*Rules.Config().no_decay, f"*{SCALES}", "*lora_*"])
    optimizer = AdamW.Config(lr=rate, decay=decay, rules=rules).build(named_parameters=trained)
    _own_rate(optimizer, scales)
    ema: EMA | None = EMA.Config(decay=average).build(model=model) if average is not None else None
    schedule = Cosine.Config(warmup=max(1, steps // 20), steps=steps, floor=floor).build()
    dtype = "bfloat16" if device().type == "cuda" else "float32"
    step = Step(model, objective, optimizer, schedule, Clip.Config().build(), micro=None, dtype=dtype, seed=seed)
    with progress(title, total=steps, unit="steps") as advance:
        for number, batch in zip(range(steps), read, strict=False):
            taken = step(batch, number, tokens=batch.tokens)
            if ema is not None:
                ema.update(model)
            advance(note=f"loss {taken.loss:.3f}")
    if ema is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in ema.averages:
                    parameter.copy_(ema.averages[name])
    return model.eval()


def _own_rate(optimizer: Any, factor: float) -> None:
    """Learned scales in groups of their own, with their own rate."""
    groups = []
    for group in optimizer.param_groups:
        pairs = list(zip(group["names"], group["params"], strict=True))
        for mine in (False, True):
            kept = [(name, value) for name, value in pairs if name.endswith(SCALES) is mine]
            if kept:
                rate = group["initial_lr"] * (factor if mine else 1.0)
                names, params = [name for name, _ in kept], [value for _, value in kept]
                groups.append(dict(group, names=names, params=params, lr=rate, initial_lr=rate))
    optimizer.param_groups[:] = groups


def base(ground: Ground, seed: int, name: str = "base", config: Decoder.Config | None = None) -> Decoder:
    """A model trained from nothing; models with other trees and the same seed read the same text."""
    model = built(config or tree(ground), seed, "base")
    read = batches(ground, ground.steps, seed, "base")
    return learn(
        model, NextToken.Config().build(), read, ground.steps, ground.rate, seed=seed, title=f"training {name}"
    )


def towards(teacher: Decoder, **settings: Any) -> Objective:
    """To say what the teacher says."""
    frozen = copy.deepcopy(teacher).eval().requires_grad_(False)
    objective: Objective = Distill.Config(**settings).build(teacher=frozen)
    return objective


def loss(model: Decoder, ground: Ground, seed: int) -> float:
    """Nats a character on text that nobody learns from."""
    return held_out(model, ground, seed)["loss"]


def held_out(model: Decoder, ground: Ground, seed: int) -> dict[str, float]:
    """`loss` and `accuracy` (the share of characters that the model finds likeliest) on text that nobody learns from."""
    rows = min(64, ground.held_out)
    return _told(model, batches(ground, -(-ground.held_out // rows), seed, "held out", rows))


def loss_on(model: Decoder, read: Iterable[Batch]) -> float:
    """Nats a character on these batches."""
    return _told(model, read)["loss"]


@torch.no_grad()
def strays(model: Decoder, same: Objective, read: Iterable[Batch]) -> float:
    """Nats a character between a model and the one that `same` comes from (`towards`)."""
    model.eval()
    found = [same(model, batch) for batch in read]
    return sum(float(each.value) for each in found) / sum(float(each.weight) for each in found)


@torch.no_grad()
def _told(model: Decoder, read: Iterable[Batch]) -> dict[str, float]:
    model.eval()
    objective = NextToken.Config().build()
    value = weight = right = 0.0
    for batch in read:
        found = objective(model, batch)
        value, weight = value + float(found.value), weight + float(found.weight)
        right += float(found.parts["correct"])
    return {"loss": value / weight, "accuracy": right / weight}


def copied(model: Decoder) -> Decoder:
    return copy.deepcopy(model)


# Counting -------------------------------------------------------------------------------------------------------------


def nbytes(model: nn.Module) -> int:
    """What a model's tensors take when stored: packed weights as their formats lay them out, all else (norms, side paths, weights
    that no format packs) at two bytes a number."""
    total = 0
    for module, attribute in tensor_names(model).values():
        if isinstance(module, Weight) and attribute == "weight":
            total += module.format.nbytes(tuple(module.shape), torch.float16)
        else:
            total += 2 * getattr(module, attribute).numel()
    return total


def linear_bits(model: Decoder, sides: bool = False) -> float:
    """Bits for each weight of the linear maps of the layers, with scales and tables; `sides`: and side paths."""
    total = weights = 0
    for module in model.stack.modules():
        if isinstance(module, Weight):
            total += 8 * module.format.nbytes(tuple(module.shape), torch.float16)
            weights += int(np.prod(module.shape))
            if sides:
                total += 16 * sum(value.numel() for name, value in module.named_parameters() if "lora_" in name)
    return total / weights


def checksum(model: nn.Module) -> str:
    """Of every tensor but those of side paths, by name: weights as they are stored, norms and biases."""
    found = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        if not name.rpartition(".")[2].startswith("lora_"):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def mean(values: Sequence[float], unit: str = "", note: str = "") -> Value:
    """With the least and the most of them."""
    extra = f"mean of {len(values)}; the interval is the least and the most of them"
    return Value(statistics.fmean(values), unit, min(values), max(values), f"{note}; {extra}" if note else extra)


def ratio(ones: Sequence[float], others: Sequence[float], note: str) -> Value:
    """Of the means, which chance moves less than a mean of ratios; with the least and the most ratio of a pair."""
    each = [one / other for one, other in zip(ones, others, strict=True)]
    note = f"{note}; of the means of {len(each)}; the interval is the least and the most ratio of one"
    return Value(sum(ones) / sum(others), "x", min(each), max(each), note)
