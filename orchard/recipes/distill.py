"""Distillation: a student learns what a teacher would say, and how sure it would be."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.objectives.distill import Distill
from orchard.recipes.base import recipe
from orchard.recipes.files import batches, measured, rows_of
from orchard.recipes.run import Run
from orchard.recipes.shapes import llama
from orchard.train.optim import AdamW
from orchard.train.trainer import Trainer


@recipe
def distill(
    data: str | Sequence[str],
    teacher: str = "smollm2",
    base: str | None = None,
    size: str = "10m",
    divergence: str = "forward",
    temperature: float = 1.0,
    hard: float = 0.0,
    top_k: int | None = None,
    steps: int = 1000,
    rows: int = 16,
    length: int = 512,
    lr: float = 5e-4,
    too_long: str = "skip",
    held_out: str | None = None,
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Train a student, small or not, on what a teacher gives to every next token.

    The student begins as `base`, which has to share the teacher's vocabulary, or as a fresh model of a size.

    data: files or folders of .jsonl, .parquet or text
    teacher: the model to learn from
    base: the model to begin from; none: a fresh one
    size: of a fresh student: 1m, 10m, 135m, 360m or 1b
    divergence: forward, reverse, mixed, skew, skew_reverse or jensen_shannon
    temperature: of both distributions
    hard: the share of plain next-token loss
    top_k: so many of the teacher's likeliest tokens count one by one; none: all
    steps: updates of the weights
    rows: rows of a step, of all processes together
    length: tokens of a row, and the context of a fresh student
    lr: the highest learning rate
    too_long: a sample longer than a row: stop, skip or cut
    held_out: files to measure the loss on
    dtype: what is computed in: float32 or bfloat16
    micro: rows at a time, where memory is short
    seed: of fresh weights and of the order of the data
    """
    return Run.Config(
        train=Trainer.Config(
            model=None if base is not None else llama(size, length),
            objective=Distill.Config(divergence=divergence, temperature=temperature, hard=hard, top_k=top_k),
            source=batches(rows_of(data, seed=seed), count=rows, length=length, too_long=too_long),
            held_out=measured(held_out, count=rows, length=length, too_long=too_long),
            steps=steps,
            micro=micro,
            optim=AdamW.Config(lr=lr),
            dtype=dtype,
            seed=seed,
        ),
        base=base,
        tokenizer=teacher if base is None else None,
        teacher=teacher,
    )
