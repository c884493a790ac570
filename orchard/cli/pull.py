"""`orchard pull NAME`: bring a model into the library."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard.cli.common import JsonOption, OfflineOption, human_bytes, note, print_json


def pull(
    name: Annotated[str, typer.Argument(help="smollm2, or org/name or org/name:FILE.gguf from the hub.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again even if it is here and whole.")] = False,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a model into the library, checked against its checksum."""
    from orchard.weights.pull import pull as fetch

    said: list[str] = []
    entry = fetch(name, force=force, offline=offline, say=lambda line: (said.append(line), note(line))[1])
    if as_json:
        print_json(entry.to_dict())
    elif not any("already here" in line for line in said):
        note(f"pulled {entry.name}: {human_bytes(entry.bytes)}, {entry.licence or 'licence not stated'}")
