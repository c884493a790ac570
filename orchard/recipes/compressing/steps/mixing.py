"""The step that chooses: more bits where the model would notice, fewer where it does not, as many in all as a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.core.errors import UsageError
from orchard.core.files import write_text
from orchard.recipes.compressing.step import Ground, Lessons, Step
from orchard.recipes.compressing.steps import step
from orchard.transforms.base import Transform
from orchard.transforms.lora import ALL_LINEAR

FOUND = "sensitivity.json"
METHODS = ("rtn", "gptq", "awq")


@step
def mixed(
    choices: Sequence[int] = (2, 4),
    group: int | None = 64,
    train: bool = False,
    by: str = "gptq",
    embedding: int | None = 4,
    targets: str | Sequence[str] = ALL_LINEAR,
    tokens: int | None = None,
    share: float = 1.0,
    lr: float = 5e-4,
    average: float | None = None,
) -> Step:
    """Choose bits for each linear map by how much the model minds, under the plan's budget.

    choices: the bits to choose from
    group: weights that share a scale; none: a whole row
    train: train the weights as they will be kept
    by: without training, how they are rounded: rtn, gptq or awq
    embedding: with training, bits of the embedding; none: as it is
    targets: all-linear, or names and patterns of linear maps
    tokens: with training: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    average: with training, keep an average of the weights with this decay
    """
    bits = sorted(set(choices))
    if len(bits) < 2 or not set(bits) <= {2, 4, 8}:
        raise UsageError(f"choices are {list(choices)}", hint="give two or three of 2, 4 and 8")
    if by not in METHODS:
        raise UsageError(f"by is {by!r}", hint="use one of " + ", ".join(METHODS))
    settings: dict[str, Any] = {"group": group, "targets": targets}

    def choose(ground: Ground) -> Transform:
        formats = _allocated(ground, bits, settings)
        if train:
            from orchard.transforms.qat import Qat

            chosen = {path: format.builds.bits for path, format in formats.items()}
            return Qat(bits=bits[0], embedding=embedding, bits_of=chosen, **settings)
        return _rounding(by)(targets=(), formats=formats)

    if train:
        from orchard.transforms.qat import Qat

        least, most = (Qat(bits=number, embedding=embedding, **settings) for number in (bits[0], bits[-1]))
        lessons = Lessons(share=share, tokens=tokens, lr=lr, average=average)
        return Step(least, choose, most, lessons=lessons, packs=True, costs=(1.05, 1.7))
    smallest, largest = (_rounding(by)(bits=number, **settings) for number in (bits[0], bits[-1]))
    return Step(smallest, choose, largest, packs=True, costs=(1.02, 3.0))


def _allocated(ground: Ground, bits: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
    """A format for each path. What was found out about the model stays in the step's folder: finding it takes long."""
    from orchard.transforms.mixed import allocate
    from orchard.transforms.ptq import integers
    from orchard.transforms.sensitivity import Sensitivity, sensitivity

    place: Path = ground.folder / FOUND
    if place.is_file():
        found = Sensitivity.from_json(place.read_text(encoding="utf-8"))
    else:
        formats = [integers(number, settings["group"]) for number in bits]
        found = sensitivity(ground.model, ground.texts, formats, ground.tell, targets=settings["targets"])
        write_text(place, found.to_json())
    assert ground.room is not None  # the plan has a budget, or it was refused
    return allocate(found, budget_bytes=ground.room, fixed=0)


def _rounding(by: str) -> Any:
    if by == "rtn":
        from orchard.transforms.rtn import Rtn

        return Rtn
    if by == "awq":
        from orchard.transforms.awq import Awq

        return Awq
    from orchard.transforms.gptq import Gptq

    return Gptq
