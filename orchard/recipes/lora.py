"""Supervised fine-tuning through side paths, beside a model that stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.recipes.adapter import Adapter
from orchard.recipes.base import recipe
from orchard.recipes.run import Run
from orchard.recipes.sft import sft
from orchard.train.optim import AdamW


@recipe
def lora(
    data: str | Sequence[str],
    base: str = "smollm2",
    method: str = "lora",
    r: int = 32,
    alpha: float = 64.0,
    dropout: float = 0.0,
    quantize: str | None = None,
    unpack: bool = False,
    steps: int = 300,
    rows: int = 16,
    length: int = 1024,
    lr: float = 5e-4,
    turns: str = "all",
    too_long: str = "stop",
    held_out: str | None = None,
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Fine-tune an adapter beside a frozen model on conversations.

    A base whose file is packed (GGUF) stays packed. The result is a PEFT folder that says which model it is for.

    data: files or folders of .jsonl or .parquet with messages, prompt and completion, or text
    base: the model to adapt: a name of the library, a GGUF file or a Hugging Face folder
    method: lora, dora or rslora
    r: the rank of the side paths
    alpha: side paths count alpha / r times (rslora: alpha over the root of r)
    dropout: of what side paths read
    quantize: pack the base's linear maps while it is frozen: q8_0 or q4_0
    unpack: make a packed base dense, for speed
    steps: updates of the weights
    rows: rows of a step, of all processes together
    length: tokens of a row; short conversations share one and do not see each other
    lr: the highest learning rate
    turns: which answers of a conversation are learnt: all or last
    too_long: a conversation longer than a row: stop, skip or cut
    held_out: files to measure the loss on
    dtype: what is computed in: float32 or bfloat16
    micro: rows at a time, where memory is short
    seed: of the side paths and of the order of the data
    """
    run = sft(
        data,
        base,
        steps=steps,
        rows=rows,
        length=length,
        lr=lr,
        turns=turns,
        too_long=too_long,
        held_out=held_out,
        dtype=dtype,
        micro=micro,
        seed=seed,
    )
    run.train.optim = AdamW.Config(lr=lr, decay=0.0)
    run.adapter = Adapter.Config(method=method, r=r, alpha=alpha, dropout=dropout, quantize=quantize, unpack=unpack)
    return run
