"""One of the stages of a pipeline: `python -m tests.train.pipeline_program JSON`, with torchrun's environment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import OrchardError, UnsupportedPair
from orchard.train.world import World, world
from tests.train.pipeline_cases import Case, Run, run


def resumed(here: World, folder: Path, kind: str, mesh: dict[str, Any]) -> dict[str, Any]:
    """Go on from step 3 of one process to step 6, save that, and go on to step 8."""
    one = Run(Case(mesh=mesh, kind=kind), here)
    assert one.load(folder / "one") == 3
    one.go(range(3, 6))
    one.save(folder / "two", 6)
    one.go(range(6, 8))
    return one.result()


def cut_elsewhere(here: World, folder: Path) -> list[str]:
    """States in 8 bits belong to one process's shard: they come back to the same stages, and are refused on others."""
    said = []
    mesh = {"pipeline": 2, "data": 2}
    one = Run(Case(mesh={**mesh, "cuts": [1]}, eight=True), here)
    one.go(range(1))
    one.save(folder, 1)
    for cuts in ([1], [3]):
        two = Run(Case(mesh={**mesh, "cuts": cuts}, eight=True), here)
        try:
            said.append(str(two.load(folder)))
        except UnsupportedPair as error:
            said.append(error.message)
    return said


def spoilt(here: World, stage: int) -> dict[str, Any]:
    """A gradient that is not finite on one stage is known on both; what is finite but large is no such thing."""
    one = Run(Case(mesh={"pipeline": 2}, kind="tied"), here)
    trained = dict(one.trained)
    for parameter in trained.values():
        parameter.grad = torch.full_like(parameter, 1e30)
    large = one.clip(one.trained, others=one.pipeline)
    name = "stack.layers.0.mlp.up.weight" if stage == 0 else "norm.weight"
    if one.mesh.stage == stage:
        trained[name].grad[0] = float("nan")  # type: ignore[index]
    bad = one.clip(one.trained, others=one.pipeline)
    return {"large": [large.value, *large.bad], "bad": list(bad.bad)}


def lost(here: World, gone: int) -> None:
    """In the third step one stage is killed."""
    one = Run(Case(mesh={"pipeline": 2}), here)
    for step in range(1000):
        if step == 3 and here.rank == gone:
            os.kill(os.getpid(), signal.SIGKILL)
        one.go(range(1))


def one_of(what: str, here: World, *args: Any) -> Any:
    if what == "resumed":
        return resumed(here, Path(args[0]), *args[1:])
    if what == "cut elsewhere":
        return cut_elsewhere(here, Path(args[0]))
    if what == "spoilt":
        return spoilt(here, *args)
    if what == "lost":
        return lost(here, *args)
    return run(Case(**args[0]), here)


def main(asked: list[list[Any]]) -> None:
    """Each of what is asked, in one start of the processes; results, and the error that ended them, as JSON."""
    torch.set_num_threads(1)
    said: list[Any] = []
    error: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with world(device="cpu", timeout=60) as here:
            for what, *args in asked:
                began = time.monotonic()
                said.append(one_of(what, here, *args))
    except OrchardError as found:
        error = {"error": type(found).__name__, **found.to_dict(), "ranks": getattr(found, "ranks", None)}
    sys.stdout.write(json.dumps({"said": said, **error, "took": time.monotonic() - began}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
