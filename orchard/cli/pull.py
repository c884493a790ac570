"""`orchard pull NAME`: bring a model into the library."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard.cli.common import JsonOption, note, print_json


def pull(
    name: Annotated[str, typer.Argument(help="smollm2, or org/name or org/name:FILE.gguf from the hub.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again even if it is here and whole.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing when all is well; the bar stays.")] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            envvar="ORCHARD_OFFLINE",
            show_envvar=False,
            help="Only check what is here, and fail where it would have to be fetched.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a model into the library, checked against its checksum."""
    from orchard.weights.pull import pull as fetch

    entry = fetch(name, force=force, offline=offline, say=None if quiet else note)
    if as_json:
        print_json(entry.to_dict())
