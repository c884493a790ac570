"""How alike two models are, token by token, on text: what a compressed model is held against.

    found = likeness(small, original, batches)
    found.ratio, found.kl, found.agreement, found.tokens

`loss` is the mean surprise at the text itself, `reference` the other model's, `ratio` one over the other. `kl` is
KL(reference‖model), the mean over all places of what the model's distribution loses of the reference's (nats); it sees changes
that leave the text as likely as before. `agreement` is the share of places where both hold the same token to be the likeliest:
what greedy answers depend on.

A model that keeps keys and values in few bits only shows what that costs when it reads through its stores: `stores` has it do so,
for rows of one document each.

Batches are read one after another and scores are made for some places at a time, so that neither the length of the text nor the
size of the vocabulary decides how much memory is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, Batch
from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair, UsageError

ROOM = 1 << 24
"""Scores of one model that are there at a time; at least those of one place."""
SUMS = ("tokens", "loss", "reference", "kl", "same")


class Reads(Protocol):
    """What is asked of a model; `orchard.models.language.decoder.Decoder` is one."""

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """[B, T, dim]"""

    def scores(self, hidden: Tensor) -> Tensor:
        """[..., V]"""


@dataclass(frozen=True)
class Likeness:
    """Means over all places that have a target. Not-a-number where a model gave what is no number."""

    tokens: int
    loss: float
    reference: float
    kl: float
    agreement: float

    @property
    def ratio(self) -> float:
        """The model's loss over the reference's: 1 is as good, more is worse."""
        return self.loss / self.reference if self.reference else math.nan

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (self.loss, self.reference, self.kl)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is no finite number is None, which JSON can say."""
        facts = {**asdict(self), "ratio": self.ratio}
        return {name: _plain(value) for name, value in facts.items()}

    @staticmethod
    def from_dict(facts: Any) -> Likeness:
        names = ("loss", "reference", "kl", "agreement")
        values = {name: math.nan if facts[name] is None else float(facts[name]) for name in names}
        return Likeness(tokens=int(facts["tokens"]), **values)


@torch.no_grad()
def likeness(
    model: Any,
    reference: Any,
    batches: Iterable[Batch],
    *,
    stores: bool = False,
    room: int = ROOM,
    tell: Callable[[float], None] | None = None,
) -> Likeness:
    """Hold a model against another of the same vocabulary. Both should be in `eval()`; `stores`: the model reads
    its own keys and values as it keeps them. `tell` is told of every batch (1.0)."""
    sums = dict.fromkeys(SUMS, 0.0)
    for batch in batches:
        for name, value in _batch(model, reference, batch, room, stores).items():
            sums[name] += value
        if tell is not None:
            tell(1.0)
    return _means(sums)


def together(parts: Iterable[Likeness]) -> Likeness:
    """Several texts as one: each place counts the same, whichever text it is of."""
    sums = dict.fromkeys(SUMS, 0.0)
    for one in parts:
        sums["tokens"] += one.tokens
        for name, value in (("loss", one.loss), ("reference", one.reference), ("kl", one.kl), ("same", one.agreement)):
            sums[name] += value * one.tokens
    return _means(sums)


# Inside -----------------------------------------------------------------------------------------------------------------


def _means(sums: dict[str, float]) -> Likeness:
    count = sums["tokens"]
    if not count:
        raise UsageError("there is no text to compare two models on", hint="give batches with targets")
    means = {name: sums[name] / count for name in ("loss", "reference", "kl")}
    return Likeness(tokens=int(count), agreement=sums["same"] / count, **means)


def _batch(model: Any, reference: Any, batch: Batch, room: int, stores: bool) -> dict[str, float]:
    """Sums of one batch. The two models may live in different places; text is brought to each."""
    hidden, targets = _read(model, batch, stores)
    others, _ = _read(reference, batch)
    sums = dict.fromkeys(SUMS, 0.0)
    step, at = max(1, room), 0
    while at < len(targets):
        scores = model.scores(hidden[at : at + step if at else at + 1]).float()
        step = max(1, room // scores.shape[-1])  # known after the first place
        end = at + len(scores)
        told = reference.scores(others[at:end]).float().to(scores.device)
        if told.shape != scores.shape:
            raise UnsupportedPair(
                f"one model scores {scores.shape[-1]} tokens and the other {told.shape[-1]}",
                hint="compare models of one vocabulary",
            )
        for name, value in _places(scores, told, targets[at:end]).items():
            sums[name] += value
        at = end
    return sums


def _read(model: Any, batch: Batch, stores: bool = False) -> tuple[Tensor, Tensor]:
    """What the head reads [n, dim] at the places that have a target, and the targets."""
    device = getattr(model, "device", torch.device("cpu"))
    here = batch.to(device)
    if stores:
        if not here.plain and int(here.documents.max()) > 0:
            raise UsageError("a row holds several documents, and stores only one", hint="lay out one document a row")
        cache = model.cache(batch=len(here), length=here.ids.shape[1])
        context = Context(positions=here.positions, cache=cache)
    else:
        documents = None if here.plain else here.documents
        context = Context(positions=here.positions, documents=documents, causal=here.plain)
    hidden = model.hidden(here.ids, context)
    counted = (here.targets != IGNORED).flatten().nonzero()[:, 0]
    return hidden.flatten(0, 1).index_select(0, counted), here.targets.flatten().index_select(0, counted)


def _places(scores: Tensor, told: Tensor, targets: Tensor) -> dict[str, float]:
    same = scores.argmax(-1) == told.argmax(-1)
    q, p = scores.log_softmax(-1), told.log_softmax(-1)
    loss, reference = (-x.gather(-1, targets[:, None]).double().sum() for x in (q, p))
    # What the reference holds impossible counts for nothing, also where the model does.
    kl = torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1)
    # A divergence is never below zero; what rounding leaves of one that is zero may be.
    sums = (loss, reference, kl.double().sum().clamp_min(0), same.sum())
    found = {name: float(value) for name, value in zip(SUMS[1:], sums, strict=True)}
    return {"tokens": float(len(targets)), **found}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
