"""`orchard pull NAME`: bring a model into the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli.common import human_bytes, note, print_json
from orchard.cli.options import JsonOption

if TYPE_CHECKING:
    from orchard.weights.library import Entry


def pull(
    name: Annotated[str, typer.Argument(help="smollm2, minilm, or org/name or org/name:FILE.gguf from the hub.")],
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
    _prepare(entry, quiet)
    if as_json:
        print_json(entry.to_dict())


def _prepare(entry: Entry, quiet: bool) -> None:
    """Pack the model for the native engine, so that its first answer comes quickly. The model is here and whole whatever
    becomes of this, so nothing that goes wrong now is a failure of the pull."""
    from orchard.ops.kernels.native import library
    from orchard.session.prepare import packed_path, prepare
    from orchard.session.shelf import is_embedder

    def tell(line: str) -> None:
        if not quiet:
            note(line)

    try:
        if is_embedder(str(entry.model_path)):
            return  # torch runs it as it is
        there = packed_path(entry.model_path).is_file()
        if not there and library() is not None:
            from orchard.cli.process import import_torch

            import_torch()
        path = prepare(entry.model_path, say=tell)
        if path is not None and not there:
            tell(f"packed it for the native engine: {human_bytes(path.stat().st_size)}")
    except Exception as error:
        tell(f"it is not packed for the native engine ({error}), so it may start more slowly")
