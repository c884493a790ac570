"""From a look at the data to the config of a run: how many steps, how wide, how fast to learn, in what numbers, and how long.

The defaults are for a few hundred to a few thousand samples. Rank 32 beside every linear map; eight samples a step; the learning
rate of side paths, which is ten times that of whole models (arXiv 2106.09685 and 2402.09353 use 1e-4 to 1e-3); no weight decay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.core.config_parse import BadSetting, assigned
from orchard.core.errors import ConfigError, UsageError
from orchard.core.machine import hardware
from orchard.data.batches import Batches
from orchard.data.encode import Encode
from orchard.data.jsonl import Jsonl
from orchard.data.order import Repeat
from orchard.data.packing import Pack
from orchard.data.prefetch import Prefetch
from orchard.recipes.adapter import Adapter
from orchard.recipes.run import Run
from orchard.train.optim import AdamW
from orchard.train.schedule import Cosine
from orchard.train.trainer import Saving, Trainer

METHODS = ("lora", "dora", "rslora", "qlora")
ROWS, RATE, EPOCHS, RANK = 8, 5e-4, 3, 32
MULTIPLE = 16
"""Rows are as wide as the longest of a step, rounded up to this."""
HELD_OUT = "held out"
_REACHED = {"bfloat16": 0.2, "float32": 0.6}
"""The part of a large multiplication's speed that a step of a small model was seen to reach on a CPU."""


@dataclass(frozen=True)
class Shape:
    """What a plan has to know of the prepared rows."""

    train: Path
    held: Path | None
    rows: int
    tokens: int
    longest: int
    turns: str
    context: int
    """The most tokens of a row."""


def plan(
    model: str,
    shape: Shape,
    *,
    method: str = "lora",
    rank: int = RANK,
    epochs: float = EPOCHS,
    steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    settings: Sequence[str] = (),
) -> Run.Config:
    """The config of the run, with `settings` (`path=value`) applied last."""
    _check(method, rank, epochs, steps)
    packed = shape.tokens * 2 < shape.rows * shape.longest
    length = min(-(-shape.longest // MULTIPLE) * MULTIPLE, shape.context)
    # Short and long samples share rows; eight samples a step either way.
    units = math.ceil(shape.tokens * 1.05 / length) if packed else shape.rows
    rows = max(1, min(round(ROWS * units / shape.rows), units)) if packed else min(ROWS, shape.rows)
    total = steps or max(1, math.ceil(units * epochs / rows))
    kind = "lora" if method == "qlora" else method
    train = Trainer.Config(
        source=Prefetch.Config(source=_source(shape.train, rows, length, shape.turns, packed, seed)),
        steps=total,
        optim=AdamW.Config(lr=RATE, decay=0.0),
        schedule=Cosine.Config(warmup=max(1, total // 20), steps=total, floor=0.1),
        dtype=fast_dtype(device),
        seed=seed,
        save=Saving.Config(every=max(10, math.ceil(total / 10)), keep=1),
        held_out={HELD_OUT: _source(shape.held, rows, length, shape.turns, packed)} if shape.held else {},
        held_out_every=max(1, math.ceil(total / max(1, math.ceil(epochs)))),
    )
    # A base that is packed in its file stays packed for QLoRA; one that is not is packed, in eight bits.
    quantize = "q8_0" if method == "qlora" and not model_is_packed(model) else None
    adapter = Adapter.Config(
        method=kind, r=rank, alpha=2.0 * rank, quantize=quantize, unpack=method != "qlora" and model_is_packed(model)
    )
    cfg = Run.Config(train=train, base=model, adapter=adapter, device=device)
    try:
        for setting in settings:
            cfg = assigned(cfg, setting)
        return cfg.complete()
    except ConfigError as error:
        raise BadSetting(error.message, hint=error.hint) from error


def model_is_packed(model: str) -> bool:
    """Whether a model's file may hold packed weights."""
    from orchard.weights.library import Library

    return Library().resolve(model).suffix in (".gguf", ".orchard")


def fast_dtype(device: str) -> str:
    """bfloat16 where the machine multiplies it faster than float32. Side paths and their updates are float32 either way."""
    import torch

    from orchard.session.place import device_of

    place = device_of(device)
    if place.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if place.type == "cpu" and {"amx", "avx512-bf16"} & set(hardware()["flags"]) else "float32"


def seconds_for(parameters: int, tokens: float, dtype: str, device: str) -> float:
    """About how long learning from so many tokens takes: four operations for each weight and token (the base's own gradients
    are not needed), at a part of the speed that this machine multiplies matrices with now."""
    import torch

    from orchard.session.place import device_of

    place = device_of(device)
    size = 1024 if place.type == "cpu" else 8192  # a smaller one is over before a GPU has begun
    a, b = (torch.ones(size, size, dtype=getattr(torch, dtype), device=place) for _ in range(2))
    (a @ b).sum().item()  # the first sets things up
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        (a @ b).sum().item()
        times.append(time.perf_counter() - begun)
    speed = 2 * size**3 / sorted(times)[1] * _REACHED[dtype]
    return 4.0 * parameters * tokens / speed


# Inside -----------------------------------------------------------------------------------------------------------------


def _source(path: Path, rows: int, length: int, turns: str, packed: bool, seed: int | None = None) -> Any:
    """With a seed: without end, in another order every epoch."""
    read: Any = Jsonl.Config(paths=str(path))
    if seed is not None:
        read = Repeat.Config(source=read.clone(order="shuffled", seed=seed))
    samples = Encode.Config(source=read, turns=turns)
    filled = Pack.Config(source=samples, length=length, mode="packed" if packed else "padded")
    return Batches.Config(source=filled, rows=rows, multiple=0 if packed else MULTIPLE)


def _check(method: str, rank: int, epochs: float, steps: int | None) -> None:
    if method not in METHODS:
        raise UsageError(f"no method is called {method!r}", hint="use one of " + ", ".join(METHODS))
    if rank < 1:
        raise UsageError(f"an adapter of rank {rank}", hint="use a whole number from 1")
    if not 0 < epochs < 1e6 or (steps is not None and steps < 1):
        raise UsageError("an adapter has to learn something", hint="use more epochs or steps")
