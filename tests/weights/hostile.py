"""Tiny sound models to be damaged, and how they are refused afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import BadFile, OrchardError
from orchard.models.language.decoder import Decoder
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.fuzz.checkpoint_cases import Sample, make_samples, write


def sample(kind: str, family: str, **having: Any) -> Sample:
    """A sound tiny model of a family, to be damaged."""
    key = "general.architecture" if kind == "gguf" else "model_type"
    for found in make_samples():
        if (
            found.kind == kind
            and found.config[key] == family
            and all(found.config.get(k) == v for k, v in having.items())
        ):
            return copy.deepcopy(found)
    raise AssertionError(f"no such sample: {family}")


def opened(model: Sample, folder: Path) -> Decoder:
    with open_checkpoint(write(model, folder)) as checkpoint:
        return load_decoder(checkpoint)


def refusal(model: Sample, folder: Path, kind: type[OrchardError] = BadFile) -> str:
    """The message a model is refused with."""
    with pytest.raises(kind) as caught:
        opened(model, folder)
    assert caught.value.hint and caught.value.message.isprintable() and len(caught.value.message) < 400
    assert "not usable" not in caught.value.message  # a check of its own, and not the last net
    return caught.value.message
