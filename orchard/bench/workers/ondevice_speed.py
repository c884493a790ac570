"""Several models in one process that take turns: how fast each reads a long prompt and writes after a short and the long one."""

from __future__ import annotations

from typing import Any

from orchard.bench.workers.own_engine import Subject
from orchard.bench.workers.run import run_case


def task(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """`models`: label → path. For each the figures of every round, in order. The order is turned every time, so that nobody
    always comes after the same neighbour."""
    assert name == "speed", name
    subjects = {label: Subject({"model": path, "via": "runner"}) for label, path in options["models"].items()}
    found: dict[str, dict[str, list[float]]] = {label: {} for label in subjects}
    cases = [_case(length, options["steps"]) for length in (options["short"], options["prompt"])]
    for subject in subjects.values():
        for case in cases:
            run_case(subject, {**case, "steps": 4}, options["vocab"])  # caches, pages and threads of everybody
    for number in range(options["rounds"]):
        for label in list(subjects)[:: 1 if number % 2 == 0 else -1]:
            for length, case in zip((options["short"], options["prompt"]), cases, strict=True):
                measured = run_case(subjects[label], case, options["vocab"])
                found[label].setdefault(f"decode {length}", []).append(1 / measured["step"][0])
                if length == options["prompt"]:
                    found[label].setdefault(f"TTFT {length}", []).append(measured["read"][0])
    return {"figures": found, "about": {label: subject.about() for label, subject in subjects.items()}}


def _case(length: int, steps: int) -> dict[str, Any]:
    room = -(-(length + steps + 1) // 256) * 256
    return {"prompts": [length], "steps": steps, "length": room, "warm": 0, "repeats": 1}
