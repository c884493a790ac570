"""What an adapter changed, on samples that it did not learn from: the loss, and answers that are right word for word.

A low loss alone can mislead: where answers are mostly scaffolding (brackets, names of fields) it falls while what matters stays
wrong. So the model is also asked, as it will be asked later, and its answers are compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchard.core.errors import OrchardError
from orchard.core.files import write_text
from orchard.recipes.adapt_plan import HELD_OUT
from orchard.recipes.run import Run
from orchard.text.chat import chat_ids

if TYPE_CHECKING:
    from orchard.session.model import Model

ASKED = 50
"""Held-out samples whose answers are compared, at most."""
MOST_TOKENS = 512


@dataclass(frozen=True)
class Answers:
    """How many answers of a model were right, word for word, before and after."""

    asked: int
    before: int
    after: int


@dataclass(frozen=True)
class Losses:
    """The mean loss of a held-out token; None where nothing was held out."""

    before: float | None = None
    after: float | None = None


@torch.no_grad()
def loss_of(run: Run) -> float | None:
    """The loss on everything that is held out, of the model as it is now."""
    source = run.trainer.held_out.get(HELD_OUT)
    if source is None:
        return None
    run.trainer.model.eval()
    source.begin(0)
    value = weight = 0.0
    for batch in source:
        loss = run.trainer.step.loss(batch.to(run.device))
        value, weight = value + float(loss.value), weight + float(loss.weight)
    source.begin(0)
    return value / weight if weight else None


def before_of(run: Run, place: Path) -> float | None:
    """The loss before training. It is kept in a file, since a run that goes on does not have that model any more."""
    try:
        kept: float | None = json.loads(place.read_text())["loss"]
        return kept
    except (OSError, ValueError, KeyError):
        found = loss_of(run)
        write_text(place, json.dumps({"loss": found}))
        return found


def answers_of(model: Model, adapter: Path, rows: Sequence[dict[str, Any]]) -> Answers | None:
    """Ask the model with and without its adapter; None where there is nothing to ask."""
    asked = [row for row in rows if "messages" in row and not row["messages"][-1].get("tool_calls")][:ASKED]
    if not asked:
        return None
    prompts = [chat_ids(model.tokenizer, row["messages"][:-1], tools=row.get("tools")) for row in asked]
    wanted = [row["messages"][-1]["content"].strip() for row in asked]
    longest = max(len(model.tokenizer.encode_piece(text, first=False)) for text in wanted)
    counts = []
    name = model.adapters.load(adapter, name="adapted")
    try:
        for one in (model, model.adapters.model(name)):
            found = one.generate_many(prompts, max_tokens=min(longest + 8, MOST_TOKENS))
            counts.append(sum(answer.text.strip() == text for answer, text in zip(found, wanted, strict=True)))
    finally:
        model.adapters.remove(name)
    return Answers(len(asked), *counts)


def answers_if_possible(model: Model, adapter: Path, rows: Sequence[dict[str, Any]]) -> tuple[Answers | None, str]:
    """The same, or why the engine does not run this adapter."""
    try:
        return answers_of(model, adapter, rows), ""
    except OrchardError as error:
        return None, f"answers were not compared: {error}"


def told(losses: Losses, answers: Answers | None) -> list[tuple[str, str]]:
    """For a card and for people."""
    lines = []
    if losses.before is not None and losses.after is not None:
        lines.append(("held-out loss", f"{losses.before:.4f} before, {losses.after:.4f} after"))
    if answers is not None:
        lines.append(
            (
                "held-out answers that are right word for word",
                f"{answers.before} of {answers.asked} before, {answers.after} after",
            )
        )
    return lines


def facts(losses: Losses, answers: Answers | None) -> dict[str, Any]:
    """For the manifest."""
    held = {"before": losses.before, "after": losses.after} if losses.after is not None else None
    return {"loss": held, "answers": asdict(answers) if answers is not None else None}
