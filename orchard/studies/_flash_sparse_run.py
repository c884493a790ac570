"""Text through a model token by token, with what its neurons cost counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchard.cache.neurons import NeuronBuffer, NeuronWindow
from orchard.core.context import Context
from orchard.core.seeds import generator
from orchard.models.language import Decoder
from orchard.transforms.activity import Predictor, inputs_of
from orchard.transforms.neurons import Spent, spent


@dataclass(frozen=True)
class Ran:
    """Scores of the tokens after the prompt, and what these tokens cost without it and with it."""

    scores: Tensor
    spent: Spent
    total: int
    """Bytes, the prompt's too."""


@torch.no_grad()
def sampled(model: Decoder, prompts: Tensor, tokens: int, seed: int) -> Tensor:
    """Texts that the model writes, drawn and not taken greedily: a model that repeats itself would flatter every window."""
    chance = generator(seed, "sampled")
    ids = prompts
    cache = model.cache(batch=len(prompts), length=prompts.shape[1] + tokens)
    fresh = prompts
    for _ in range(tokens):
        start = ids.shape[1] - fresh.shape[1]
        places = torch.arange(start, ids.shape[1]).expand(len(ids), -1)
        last = model(fresh, Context(places, cache=cache))[:, -1].float().softmax(-1)
        fresh = torch.multinomial(last, 1, generator=chance)
        ids = torch.cat([ids, fresh], 1)
    return ids


@torch.no_grad()
def stepped(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Scores after each token of one text [1, T], the prompt's first tokens read at once, all others one by one."""
    cache, found = model.cache(batch=1, length=ids.shape[1]), []
    for at, stop in [(0, prompt), *((place, place + 1) for place in range(prompt, ids.shape[1]))]:
        hidden = model.hidden(ids[:, at:stop], Context(torch.arange(at, stop)[None], cache=cache))
        found.append(model.scores(hidden))
    return torch.cat(found, 1)[:, prompt:]


def counted(model: Decoder, texts: Tensor, prompt: int) -> Ran:
    """Every text by itself, after another: neurons of the one before are still there, as in an engine."""
    scores, before, steps, total = [], None, [], 0
    for text in texts:
        with torch.no_grad():
            cache = model.cache(batch=1, length=len(text))
            spent(model, reset=True)
            model(text[None, :prompt], Context(torch.arange(prompt)[None], cache=cache))
            before = spent(model, reset=True)
            for at in range(prompt, len(text)):
                scores.append(model(text[None, at : at + 1], Context(torch.tensor([[at]]), cache=cache))[0, 0])
        steps.append(spent(model, reset=True))
        total += before.bytes + steps[-1].bytes
    names = ("bytes", "reads", "tokens", "wanted", "hits", "loaded")
    sums = {name: sum(getattr(step, name) for step in steps) for name in names}
    means = {name: sum(getattr(step, name) for step in steps) / len(steps) for name in ("resident", "peak")}
    return Ran(torch.stack(scores), Spent(**sums, **means), total)


@torch.no_grad()
def loads(model: Decoder, predictors: dict[str, Predictor], text: Tensor, window: int) -> list[list[np.ndarray]]:
    """Which neurons each token of one text would load, [token][layer], in a window of so many tokens."""
    from orchard.studies._afm_ground import batch_of

    length = len(text) - 1
    inputs = inputs_of(model, list(predictors), [batch_of(text.numpy(), 1, length)])
    found: list[list[np.ndarray]] = [[] for _ in range(length)]
    for path, made in predictors.items():
        active = (made(inputs[path]) > 0).numpy()
        units = active.shape[1]
        kept = NeuronWindow(NeuronBuffer(units, 1, capacity=units), window)
        for at, token in enumerate(active):
            used = np.flatnonzero(token)
            plan = kept.begin(used, [used][:window], 1)
            kept.buffer.append(plan.stay, torch.zeros(len(plan.stay), 1))
            kept.end(plan)
            found[at].append(np.concatenate([plan.stay, plan.passing]))
    return found
