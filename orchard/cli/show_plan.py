"""`orchard show NAME --plan`: the steps that the native engine runs for a model, or why it runs on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchard.cli.common import note, print_json


def show_plan(name: str, path: Path, *, as_json: bool = False) -> None:
    """Print the plan that really runs. A model that is not packed yet is packed first, as `load` would do."""
    from orchard.session.prepare import ready

    found = ready(path, say=note)
    if as_json:
        print_json({"name": name, "native": found.plan is not None, "reason": found.reason} | _facts(found))
        return
    if found.plan is None:
        print(f"{name} runs on torch, without a plan: {found.reason}")
        return
    from orchard.ops.plan.text import table

    print(name)
    for line in table(found.plan):
        print(f"  {line}")
    if found.reason:
        note(f"it has no packed file: {found.reason}")


def _facts(found: Any) -> dict[str, Any]:
    """The plan as plain data: its steps, what they cost, and those among them that run in torch."""
    if found.plan is None:
        return {"packed": None, "whole": False, "torch": [], "totals": None, "steps": []}
    from orchard.ops.plan.text import describe, totals

    torch = [{"node": step.node, "reason": step.reason} for step in found.plan.steps if step.kind == "torch"]
    path = str(found.path) if found.path is not None else None
    whole, steps = found.plan.whole, describe(found.plan)
    return {"packed": path, "whole": whole, "torch": torch, "totals": totals(found.plan), "steps": steps}
