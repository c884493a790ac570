"""`orchard rm NAME`: delete a model from the library."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchard.cli.common import JsonOption, human_bytes, note, print_json
from orchard.core.errors import UsageError


def rm(
    name: Annotated[str, typer.Argument(help="A model of the library.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model from the library."""
    from orchard.weights.library import Library

    library = Library()
    entry = library.find(name)
    if entry is not None and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {entry.name} needs a yes", hint=f"orchard rm {entry.name} --yes")
        if not typer.confirm(f"Delete {entry.name} ({human_bytes(entry.bytes)})?", err=True):
            note("kept")
            raise typer.Exit(1)
    removed = library.remove(name)
    if as_json:
        print_json({"removed": removed.name, "bytes": removed.bytes})
    else:
        note(f"removed {removed.name} ({human_bytes(removed.bytes)})")
