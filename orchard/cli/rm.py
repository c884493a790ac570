"""`orchard rm NAME`: delete a model from the library."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchard.cli.common import human_bytes, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError


def rm(
    name: Annotated[str, typer.Argument(help="A model of the library.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model from the library."""
    from orchard.session.prepare import forget
    from orchard.weights.library import Library

    library = Library()
    entry = library.find(name)
    if not yes and (entry is not None or name in library.unfinished()):
        what = f"{entry.name} ({human_bytes(entry.bytes)})" if entry else f"what an unfinished pull of {name} left"
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {what} needs a yes", hint=f"orchard rm {name} --yes")
        if not typer.confirm(f"Delete {what}?", err=True):
            note("kept")
            raise typer.Exit(1)
    removed = library.remove(name, waiting=lambda: note(f"a pull of {name} is running; waiting for it to end"))
    # Its packed files may be of another state of it, or of the folder where the record was damaged.
    files = {removed.path / file for file in removed.files}  # the model's, and that of a draft that came with it
    packed = sum(forget(path) for path in {removed.path, removed.model_path, removed.path / "model.gguf", *files})
    if as_json:
        print_json({"removed": removed.name, "bytes": removed.bytes, "packed_bytes": packed})
    else:
        also = f", and {human_bytes(packed)} that were packed from it" if packed else ""
        note(f"removed {removed.name} ({human_bytes(removed.bytes)}){also}")
