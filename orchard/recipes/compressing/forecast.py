"""What a plan will come to, before anything is done: sizes from the tree, exact but for the header; the rest as guesses.

Here a plan that cannot be carried out is refused, and a budget that it cannot keep, with the nearest that can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchard.core.errors import ConfigError, OrchardError, UsageError
from orchard.nn.formats import Plain
from orchard.nn.linear import GroupedLinear, Linear
from orchard.recipes.compressing.plan import BadPlan, Plan, read_plan
from orchard.recipes.compressing.ready import READY
from orchard.recipes.compressing.sizes import Scale, Size, weight_bytes
from orchard.recipes.compressing.step import Range, Step
from orchard.transforms.mixed import BudgetImpossible

Bandwidth = Callable[[int], float | None]
"""Bytes a second that this machine reads of a set of so many bytes; None where nobody knows."""


@dataclass(frozen=True)
class Expected:
    """After one step. `least` and `most` differ where a step chooses."""

    step: Step
    least: Size
    most: Size
    guess: Range
    """Of the loss ratio."""
    tokens: int


@dataclass(frozen=True)
class Forecast:
    """`seconds`: of training, about; None where it was not worked out. `speed`: tokens a second that memory allows, before and
    after, about."""

    original: Size
    steps: tuple[Expected, ...]
    budget: int | None
    tokens: int
    seconds: float | None = None
    speed: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> Expected:
        return self.steps[-1]

    @property
    def size(self) -> Size:
        """Of what the plan ends in: as large as it may be."""
        if self.budget is None or self.last.most.file <= self.budget:
            return self.last.most
        share = (self.budget - self.last.least.file) / max(1, self.last.most.file - self.last.least.file)
        read = round(self.last.least.read + share * (self.last.most.read - self.last.least.read))
        return replace(self.last.most, file=self.budget, read=read)

    def to_dict(self) -> dict[str, Any]:
        return {
            "original": self.original.to_dict(),
            "steps": [
                {
                    "step": one.step.words,
                    "least": one.least.to_dict(),
                    "most": one.most.to_dict(),
                    "guessed_loss_ratio": [round(x, 3) for x in one.guess],
                    "tokens": one.tokens,
                }
                for one in self.steps
            ],
            "size": self.size.to_dict(),
            "budget_bytes": self.budget,
            "tokens": self.tokens,
            "training_seconds": None if self.seconds is None else round(self.seconds),
            "tokens_per_second": None if self.speed is None else [round(x, 1) for x in self.speed],
            "notes": list(self.notes),
        }


def foresee(plan: Plan, scale: Scale, tokens: int) -> Forecast:
    """Carry a plan out on the tree alone. `BadPlan` names the step that cannot be; `BudgetImpossible` the nearest that can."""
    tree = scale.built.decoder.config.complete()
    found, notes = expected(plan, scale, tokens)
    original = scale(tree)
    budget = None if plan.budget is None else plan.budget.bytes(original.weights)
    choosing = [one for one in plan.steps if one.choose is not None]
    if choosing and budget is None:
        raise BadPlan(
            f"{choosing[0].words} chooses under a budget, and there is none", hint="say one, such as --budget 3.2bpw"
        )
    if budget is not None:
        _refuse_impossible(plan, found[-1], budget, scale)
    return Forecast(original, tuple(found), budget, sum(one.tokens for one in found), notes=tuple(notes))


def expected(plan: Plan, scale: Scale, tokens: int) -> tuple[list[Expected], list[str]]:
    least = most = scale.built.decoder.config.complete()
    guess: Range = (1.0, 1.0)
    found, notes = [], []
    for number, (step, share) in enumerate(zip(plan.steps, plan.tokens_of(tokens), strict=True), 1):
        place = f"step {number} ({step.words})"
        _check(step, least, place)
        try:
            before = least
            least, most = step.tree(least).complete(), step.tree(most, largest=True).complete()
            sizes = scale(least), scale(most)
        except (ConfigError, UsageError) as error:
            raise BadPlan(f"{place}: {error.message}", hint=error.hint) from error
        if step.transform is not None and not step.transform.same and least == before:
            raise BadPlan(f"{place} changes nothing here", hint="leave it out")
        notes += [f"{place}: {note}" for note in _fallbacks(step, before)]
        guess = step.guess(guess)
        found.append(Expected(step, *sizes, guess, share))
    return found, notes


def room_for(plan: Plan, number: int, scale: Scale, budget: int) -> int:
    """Bytes that the weights which step `number` (from 0) packs may take together, all others counted."""
    tree = scale.built.decoder.config.complete()
    taken = 0
    for place, step in enumerate(plan.steps):
        before, tree = tree, step.tree(tree).complete()
        if place == number:
            changed = [(path, node) for path, node in tree.walk() if _is_new(before, path, node)]
            taken = sum(weight_bytes(node) for _, node in changed)
    return budget - (scale(tree).file - taken)


# Inside -----------------------------------------------------------------------------------------------------------------


def _check(step: Step, tree: Any, place: str) -> None:
    dense = any(isinstance(node.format, Plain.Config) for path, node in _maps(tree) if path != "head")
    if step.packs and not dense:
        raise BadPlan(f"{place} packs what is packed already", hint="leave one of them out")
    if step.lessons is not None and step.lessons.whole and step.transform is None and not dense:
        raise BadPlan(f"{place} trains weights that are packed already", hint="use recover, or put it before packing")


def _fallbacks(step: Step, tree: Any) -> list[str]:
    """What the transform would do otherwise than it was asked, weight by weight, a few of them."""
    chosen = getattr(step.transform, "chosen", None)
    if chosen is None:
        return []
    notes: list[str] = chosen(tree)[1]
    return notes if len(notes) <= 4 else [*notes[:3], f"and {len(notes) - 3} more"]


def _refuse_impossible(plan: Plan, last: Expected, budget: int, scale: Scale) -> None:
    reached = last.least.file
    if reached <= budget:
        return
    near = nearest_plan(plan, scale, budget)
    raise BudgetImpossible(
        f"the least this plan comes to is {reached / 1e6:,.4g} MB ({last.least.bits:.2f} bits per weight), "
        f"and the budget is {budget / 1e6:,.4g} MB ({8 * budget / last.least.weights:.2f})",
        hint=near,
        smallest_bytes=reached,
        smallest_bits=last.least.bits,
    )


def nearest_plan(plan: Plan, scale: Scale, budget: int) -> str:
    """A hint: the largest ready plan that fits; or the smallest there is, where none does."""
    sizes: dict[str, Size] = {}
    for name in READY:
        try:
            sizes[name] = expected(read_plan(name), scale, 1)[0][-1].least
        except OrchardError:
            continue
    fitting = {name: size for name, size in sizes.items() if size.file <= budget}
    if fitting:
        name = max(fitting, key=lambda one: fitting[one].file)
        return f"the nearest that can is {name}: {_told(fitting[name])}"
    if not sizes:
        return "give a larger budget"
    name = min(sizes, key=lambda one: sizes[one].file)
    return f"no ready plan does; the smallest is {name}: {_told(sizes[name])}"


def _told(size: Size) -> str:
    return f"{size.file / 1e6:,.4g} MB, {size.bits:.2f} bits per weight"


def _maps(tree: Any) -> list[tuple[str, Any]]:
    return [(path, node) for path, node in tree.walk() if isinstance(node, Linear.Config | GroupedLinear.Config)]


def _is_new(before: Any, path: str, node: Any) -> bool:
    """Whether a linear map is kept in another format than before."""
    if not isinstance(node, Linear.Config | GroupedLinear.Config) or path == "head":
        return False
    try:
        return bool(before.get(path).format != node.format)
    except ConfigError:
        return False
