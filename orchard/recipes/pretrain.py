"""Pretraining: a fresh model reads texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.recipes.base import recipe
from orchard.recipes.files import batches, measured, rows_of
from orchard.recipes.run import Run
from orchard.recipes.shapes import llama
from orchard.train.optim import AdamW, Muon
from orchard.train.trainer import Trainer


@recipe
def pretrain(
    data: str | Sequence[str],
    size: str = "10m",
    tokenizer: str = "bytes",
    steps: int = 1000,
    rows: int = 32,
    length: int = 512,
    lr: float = 1e-3,
    optim: str = "adamw",
    split: str = "file",
    held_out: str | None = None,
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Train a Llama-shaped model from nothing on texts.

    Rows are filled with several documents, and none sees another; long ones are cut into pieces.

    data: files or folders of text, .jsonl or .parquet with a field `text`
    size: 1m, 10m, 135m, 360m or 1b
    tokenizer: bytes, or a model whose tokenizer to use
    steps: updates of the weights
    rows: rows of a step, of all processes together
    length: tokens of a row, and the model's context
    lr: the highest learning rate
    optim: adamw or muon
    split: documents of text files: file, blank (between empty lines), or a separator
    held_out: files to measure the loss on
    dtype: what is computed in: float32 or bfloat16
    micro: rows at a time, where memory is short
    seed: of the weights and of the order of the data
    """
    return Run.Config(
        train=Trainer.Config(
            model=llama(size, length),
            source=batches(rows_of(data, seed=seed, split=split), count=rows, length=length, mode="cut"),
            held_out=measured(held_out, count=rows, length=length, mode="cut"),
            steps=steps,
            micro=micro,
            optim=optimizer(optim, lr),
            dtype=dtype,
            seed=seed,
        ),
        tokenizer=tokenizer,
    )


def optimizer(name: str, lr: float) -> BaseConfig:
    kinds: dict[str, Any] = {"adamw": AdamW, "muon": Muon}
    if name not in kinds:
        raise UsageError(f"no optimiser is called {name!r}", hint="use adamw or muon")
    made: BaseConfig = kinds[name].Config(lr=lr)
    return made
