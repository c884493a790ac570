"""Supervised fine-tuning: a model learns the answers of conversations."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.recipes.base import recipe
from orchard.recipes.files import batches, measured, rows_of
from orchard.recipes.run import Run
from orchard.train.optim import AdamW
from orchard.train.trainer import Trainer


@recipe
def sft(
    data: str | Sequence[str],
    base: str = "smollm2",
    steps: int = 300,
    rows: int = 16,
    length: int = 1024,
    lr: float = 2e-5,
    turns: str = "all",
    too_long: str = "stop",
    held_out: str | None = None,
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Fine-tune all weights of a model on conversations.

    What the assistant says is learnt, in exactly the tokens that the model reads and writes when it answers.

    data: files or folders of .jsonl or .parquet with messages, prompt and completion, or text
    base: the model to begin from: a name of the library, a GGUF file or a Hugging Face folder
    steps: updates of the weights
    rows: rows of a step, of all processes together
    length: tokens of a row; short conversations share one and do not see each other
    lr: the highest learning rate
    turns: which answers of a conversation are learnt: all or last
    too_long: a conversation longer than a row: stop, skip or cut
    held_out: files to measure the loss on
    dtype: what is computed in: float32 or bfloat16
    micro: rows at a time, where memory is short
    seed: of the order of the data
    """
    source = batches(rows_of(data, seed=seed), count=rows, length=length, turns=turns, too_long=too_long)
    return Run.Config(
        train=Trainer.Config(
            source=source,
            held_out=measured(held_out, count=rows, length=length, turns=turns, too_long=too_long),
            steps=steps,
            micro=micro,
            optim=AdamW.Config(lr=lr, decay=0.01),
            dtype=dtype,
            seed=seed,
        ),
        base=base,
    )
