"""The other way to choose: a prompt chooses groups of neurons once (instruction-following pruning), as many as a token uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orchard.cache.experts import Records
from orchard.models.language import Decoder
from orchard.objectives.by_prompt import ByPrompt
from orchard.studies._afm_ground import batches, copied, device, learn, loss_on
from orchard.studies._flash_sparse_model import Shape, text
from orchard.studies._flash_sparse_run import stepped
from orchard.transforms.ifprune import IFPrune
from orchard.transforms.ifprune_answer import Answering
from orchard.transforms.ifprune_model import Instructed
from orchard.transforms.ifprune_resident import Stored, write_groups

GROUPS = 32
"""Of each layer."""


@dataclass(frozen=True)
class Prompted:
    share: float
    """Of all neurons that a prompt's choice keeps."""
    loss: float
    """On the second half of rows whose first half chose."""
    once: float
    """Bytes for each token where the prompt chooses for the whole answer."""
    anew: float
    """Where the choice is made anew every 32 tokens."""


def taught(model: Decoder, shape: Shape, share: float, steps: int, seed: int) -> Instructed:
    """The same model, trained on to work with what a prompt chooses."""
    how = IFPrune(keep=share, groups=GROUPS, predictor="reader", steps=steps)
    made = how.apply(copied(model).to(device())).requires_grad_(True).train()
    made.updates.requires_grad_(False)
    read = batches(shape.ground, steps, seed, "by prompt")
    objective = ByPrompt.Config(span=shape.ground.length // 2).build()
    learn(made, objective, read, steps, shape.rate / 4, seed=seed, title="choosing by prompt")  # type: ignore[arg-type]
    return made.eval().requires_grad_(False).cpu()


def by_prompt(
    model: Decoder, shape: Shape, share: float, texts: Tensor, prompt: int, steps: int, seed: int, folder: Path
) -> Prompted:
    made = taught(model, shape, share, steps, seed)
    objective = ByPrompt.Config(span=shape.ground.length // 2).build()
    told = [objective(made, batch) for batch in text(shape, 8, seed, "held out by prompt")]
    lost = sum(float(each.value) for each in told) / sum(float(each.weight) for each in told)
    write_groups(made.decoder, folder / "groups")
    costs = []
    for every in (None, 32):
        total = 0
        for line in texts:
            with Records.open(folder / "groups") as records:
                working = made.config.budgets[0] * shape.layers
                stored = Stored(made, records, budget_bytes=working * records.record_bytes)
                one = Answering(stored, line[:prompt].tolist(), every=every, margin=0.1 if every else 0.0)
                with torch.no_grad():
                    stepped(one, line[None], prompt)
                total += stored.counters.bytes
                stored.resident.close()
        costs.append(total / (len(texts) * (texts.shape[1] - prompt)))
    return Prompted(made.config.budgets[0] / GROUPS, lost, costs[0], costs[1])


def plain_loss(model: Decoder, shape: Shape, seed: int) -> float:
    """Of the model with all its neurons, on the same places."""
    from orchard.objectives.by_prompt import in_spans

    read = text(shape, 8, seed, "held out by prompt")
    return loss_on(model, (in_spans(batch, shape.ground.length // 2)[2] for batch in read))
