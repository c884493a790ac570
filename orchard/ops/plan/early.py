"""A plan cut short: the first layers, then the last norm and the head. It shares every tensor with the whole plan.

A layer ends where one buffer alone, the residual, is still to be read and the next attention has not begun: so layers are counted
by their attention, whatever their modules are called.
"""

from __future__ import annotations

from dataclasses import replace

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.ops.plan import steps
from orchard.ops.plan.check import check


def layer_count(plan: steps.Plan) -> int:
    """How many layers `early_plan` can tell apart."""
    return len(_ends(plan))


def early_plan(plan: steps.Plan, layers: int) -> steps.Plan:
    """The plan after its first `layers`; with all of them it does what the whole plan does."""
    if not plan.whole:
        raise UnsupportedPair(
            "this model has steps that run in torch, which cannot be cut short",
            hint="use prompt lookup or a draft model",
        )
    ends = _ends(plan)
    if not 1 <= layers <= len(ends):
        raise ConfigError(f"{layers} layers of {len(ends)}", hint=f"use a whole number from 1 to {len(ends)}")
    alive = _alive_after(plan)
    tail = plan.steps[ends[-1] + 1 :]
    cut, whole = (next(iter(alive[end])) for end in (ends[layers - 1], ends[-1]))
    if plan.widths[cut] != plan.widths[whole]:
        raise UnsupportedPair(
            f"after layer {layers} the model is {plan.widths[cut]} wide and its head reads {plan.widths[whole]}",
            hint="use another number of layers",
        )
    kept = [*plan.steps[: ends[layers - 1] + 1], *(_renamed(step, {whole: cut, cut: whole}) for step in tail)]
    early = _tidied(_narrowed(replace(plan, steps=kept), plan))
    check(early)
    return early


def _narrowed(early: steps.Plan, plan: steps.Plan) -> steps.Plan:
    """Where the whole plan drops rows after its last store, the short one does so after its own."""
    wanted, there = (any(isinstance(step, steps.Narrow) for step in one.steps) for one in (plan, early))
    if there or not wanted:
        return early
    fills = (isinstance(step, steps.Attend) and step.k is not None for step in early.steps)
    last = max(place for place, fill in enumerate(fills) if fill)
    narrow = steps.Narrow(tuple(sorted(_alive_after(early)[last])))
    return replace(early, steps=[*early.steps[: last + 1], narrow, *early.steps[last + 1 :]])


def _ends(plan: steps.Plan) -> list[int]:
    """The last step of each layer."""
    alive = _alive_after(plan)
    attends = [place for place, step in enumerate(plan.steps) if isinstance(step, steps.Attend)]
    clean = [place for place, buffers in enumerate(alive[:-1]) if len(buffers) == 1]
    ends: list[int] = []
    for place in attends[1:]:
        before = [end for end in clean if end < place and end > (ends[-1] if ends else attends[0])]
        ends += before[-1:]
    work = (steps.Linear, steps.Gated, steps.Gate, steps.Attend, steps.Experts, steps.Torch)
    last = max((place for place, step in enumerate(plan.steps) if isinstance(step, work)), default=0)
    ends += [end for end in clean if end >= last][:1]  # what follows is the last norm and the head
    return ends


def _alive_after(plan: steps.Plan) -> list[set[int]]:
    """For each step, the buffers that later steps read before they write them anew."""
    alive: set[int] = set()
    after = []
    for step in reversed(plan.steps):
        after.append(set(alive))
        reads, writes = _touched(step)
        alive = (alive - writes) | reads
    return after[::-1]


def _touched(step: steps.Step) -> tuple[set[int], set[int]]:
    """The buffers that a step reads, and those that hold something new afterwards; one that is added to is both."""
    if isinstance(step, steps.Linear):
        writes = {output.to for output in step.outputs}
        return {step.src, *(output.to for output in step.outputs if output.add)}, writes
    if isinstance(step, steps.Gate):
        return {step.gate, step.up}, {step.to}
    if isinstance(step, steps.Attend):
        return {buffer for buffer in (step.q, step.k, step.v) if buffer is not None}, {step.to}
    if isinstance(step, steps.Add):
        return {step.src, step.to}, {step.to}
    if isinstance(step, steps.Clip):
        return {step.buffer}, {step.buffer}
    if isinstance(step, steps.Narrow):
        return set(), set()  # moves rows: what is read later counts by itself
    if isinstance(step, steps.Normalise | steps.Experts):
        return {step.src, *([step.to] if step.add else [])}, {step.to}
    if isinstance(step, steps.Gated | steps.Torch):
        return {step.src}, {step.to}
    if isinstance(step, steps.Head):
        return {step.src}, set()
    assert isinstance(step, steps.Embed)
    return set(), {step.to}


def _renamed(step: steps.Step, names: dict[int, int]) -> steps.Step:
    """The step with other numbers for its buffers."""

    def new(buffer: int) -> int:
        return names.get(buffer, buffer)

    if isinstance(step, steps.Linear):
        outputs = tuple(replace(output, to=new(output.to)) for output in step.outputs)
        return replace(step, src=new(step.src), outputs=outputs)
    if isinstance(step, steps.Narrow):
        return replace(step, buffers=tuple(map(new, step.buffers)))
    fields = ("src", "to", "gate", "up", "q", "k", "v", "buffer")
    buffers = {name: getattr(step, name, None) for name in fields}
    found = {name: new(value) for name, value in buffers.items() if isinstance(value, int)}
    return replace(step, **found) if found else step  # type: ignore[type-var]


def _tidied(plan: steps.Plan) -> steps.Plan:
    """Without buffers and stores that nothing fills any more."""
    written = sorted(set().union(*(_touched(step)[1] for step in plan.steps)))
    filled = sorted({step.store for step in plan.steps if isinstance(step, steps.Attend) and step.k is not None})
    buffers = {old: new for new, old in enumerate(written)}
    stores = {old: new for new, old in enumerate(filled)}
    made: list[steps.Step] = []
    for step in plan.steps:
        if isinstance(step, steps.Attend):
            step = replace(step, store=stores.get(step.store, -1))
        made.append(_renamed(step, buffers))
    return replace(
        plan,
        steps=made,
        widths=[plan.widths[old] for old in written],
        stores=[plan.stores[old] for old in filled],
    )
