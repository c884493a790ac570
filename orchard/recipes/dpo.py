"""Preferences: of two answers the better one becomes likelier, near the model that is there."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.objectives.preference import LOSSES, Preference
from orchard.recipes.adapter import Adapter
from orchard.recipes.base import recipe
from orchard.recipes.files import batches, rows_of
from orchard.recipes.run import Run
from orchard.train.optim import AdamW
from orchard.train.trainer import Trainer


@recipe
def dpo(
    data: str | Sequence[str],
    base: str = "smollm2",
    loss: str = "dpo",
    beta: float = 0.1,
    r: int | None = 32,
    alpha: float = 64.0,
    steps: int = 200,
    rows: int = 16,
    length: int = 1024,
    lr: float = 5e-5,
    too_long: str = "skip",
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Align a model with preferences: DPO and its kin, through an adapter or on all weights.

    The reference is the model before training. With an adapter that is the base itself, so nothing is kept twice.

    data: files or folders of .jsonl or .parquet with prompt, chosen and rejected
    base: the model to begin from: a name of the library, a GGUF file or a Hugging Face folder
    loss: dpo, ipo, hinge, simpo or orpo
    beta: how closely the model stays to the reference
    r: the rank of the side paths; none: all weights are trained (use a tenth of the learning rate, or less)
    alpha: side paths count alpha / r times
    steps: updates of the weights
    rows: pairs of a step, of all processes together
    length: tokens of prompt and answer at most
    lr: the highest learning rate
    too_long: a pair longer than that: stop, skip or cut
    dtype: what is computed in: float32 or bfloat16
    micro: pairs at a time, where memory is short
    seed: of the side paths and of the order of the data
    """
    source = batches(rows_of(data, seed=seed), count=rows, length=length, mode="padded", too_long=too_long, multiple=64)
    relative = loss in LOSSES and LOSSES[loss].relative
    return Run.Config(
        train=Trainer.Config(
            objective=Preference.Config(loss=loss, beta=beta),
            source=source,
            steps=steps,
            micro=micro,
            optim=AdamW.Config(lr=lr, decay=0.0),
            dtype=dtype,
            seed=seed,
        ),
        base=base,
        adapter=None if r is None else Adapter.Config(r=r, alpha=alpha),
        reference=relative,
    )
