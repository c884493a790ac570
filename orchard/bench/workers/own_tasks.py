"""Work for the benchmark in processes of their own, other than timing an engine: limits, quality, files for the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def limits(options: dict[str, Any]) -> Any:
    from orchard.bench.limits import measure

    return measure(options["threads"])


def quality(options: dict[str, Any]) -> Any:
    from orchard.bench.quality import measure

    return measure(options["model"], texts=options["texts"], threads=options["threads"])


def folder(options: dict[str, Any]) -> Any:
    """The model as a folder that transformers reads, in bfloat16: its own reading of GGUF takes half a minute each time."""
    from orchard.session.model import load

    load(options["model"], dtype="float32").save(options["to"], type="bfloat16")
    return {"made": True}


def shape(options: dict[str, Any]) -> Any:
    """A GGUF file of random weights."""
    from orchard.bench.shapes import Shape, write_random_gguf

    write_random_gguf(Path(options["to"]), Shape(**options["shape"]), Path(options["words"]))
    return {"made": True}


def families(options: dict[str, Any]) -> Any:
    from orchard.bench.families import nodes_in_torch

    return nodes_in_torch()


def many(options: dict[str, Any]) -> Any:
    from orchard.bench.many import measure

    return measure(options["model"], rounds=options["rounds"], quick=options["quick"])


def speculation(options: dict[str, Any]) -> Any:
    from orchard.bench.speculation import measure

    return measure(options["model"], rounds=options["rounds"])


def gpu(options: dict[str, Any]) -> Any:
    from orchard.bench.gpu import measure

    return measure(options["rounds"])


TASKS = {
    "limits": limits,
    "quality": quality,
    "folder": folder,
    "shape": shape,
    "families": families,
    "many": many,
    "speculation": speculation,
    "gpu": gpu,
}


def task(name: str, options: dict[str, Any]) -> Any:
    return TASKS[name](options)
