"""Choices with names, in a file: one for each task, made once and used by every prompt of that task.

A file is a safetensors of one tensor a choice (its scores, under its name), with budgets, temperatures and the model they belong to in
the header. It is written whole or not at all, and a file of another model is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from orchard.core.errors import BadFile, OrchardError, UsageError
from orchard.core.files import atomic_write
from orchard.transforms.ifprune_choice import Choice

FORMAT = "orchard.choices"
LONGEST_NAME = 80
LARGEST = 1 << 28
"""Bytes of a file; scores of a thousand layers of ten thousand groups are a seventh of it."""


def save_choices(path: Path | str, choices: Mapping[str, Choice], model: str = "") -> None:
    """Keep choices under their names. `model` says whose they are; who reads them may ask for it."""
    if not choices:
        raise UsageError("there are no choices to save", hint="give at least one, by name")
    for name in choices:
        _check_name(name)
    facts = {name: {"budget": one.budget, "temperature": one.temperature} for name, one in choices.items()}
    header = {"format": FORMAT, "model": model, "choices": json.dumps(facts)}
    data = save({name: one.scores.float().contiguous() for name, one in choices.items()}, metadata=header)
    with atomic_write(Path(path)) as file:
        file.write(data)


def load_choices(path: Path | str, model: str | None = None) -> dict[str, Choice]:
    """All choices of a file. `model`: whose they have to be."""
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST:
            raise BadFile(f"{path.name} is too large for choices", hint="give a file that `save_choices` wrote")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise BadFile(f"{path.name} holds no choices", hint="give a file that `save_choices` wrote")
            if model is not None and header.get("model", "") != model:
                raise UsageError(
                    f"{path.name} holds choices of {header.get('model') or 'no model'!r}, not of {model!r}",
                    hint="make them with this model",
                )
            facts = json.loads(header.get("choices", ""))
            return {name: _choice(name, file.get_tensor(name), facts[name]) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadFile(f"{path.name} cannot be read: {error.strerror or error}", hint="look at its path") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path.name} is damaged: {error}", hint="save the choices again") from error


def _choice(name: str, scores: torch.Tensor, facts: Any) -> Choice:
    try:
        warmth = facts["temperature"]
        return Choice(scores.float(), int(facts["budget"]), None if warmth is None else float(warmth))
    except OrchardError as error:
        raise ValueError(f"{name}: {error.message}") from error


def _check_name(name: str) -> None:
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or name == "__metadata__":
        raise UsageError(f"a choice cannot be called {name[:40]!r}", hint="use a short printable name")
