"""`orchard list`: the models of the library."""

from __future__ import annotations

from typing import Any

from orchard.cli.common import console, human_bytes, note, print_json
from orchard.cli.options import JsonOption


def list_models(as_json: JsonOption = False) -> None:
    """List the models of the library, and those that came with the checkout."""
    from orchard.weights.library import DEFAULT_MODEL, Library
    from orchard.weights.parts import parcels

    library = Library()
    entries = library.list()
    rows = [_row(entry) for entry in entries]
    here = {entry.name for entry in entries}
    waiting = [parcel.to_dict() for parcel in parcels() if parcel.name not in here]
    if as_json:
        print_json({"home": str(library.home), "models": rows, "available": waiting})
        return
    if not rows and not waiting:
        note(f"the library at {library.home} is empty; get the default model: orchard pull {DEFAULT_MODEL}")
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "family", "size", "quantisation", "source"):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    for row in rows:
        quantisation = f"damaged: {row['damaged']}" if row["damaged"] else row["quantisation"]
        table.add_row(row["name"], row["family"], human_bytes(row["bytes"]), quantisation, row["source"])
    for row in waiting:
        state = f"damaged: {row['damaged']}" if row["damaged"] else "available: joined when it is first used"
        table.add_row(row["name"], "", human_bytes(row["bytes"]), state, row["path"])
    console().print(table)
    for row in rows:
        if row["damaged"]:
            note(
                f"{row['name']} is damaged; get it again with `orchard pull {row['name']}`, or `orchard rm {row['name']}`"
            )


def _row(entry: Any) -> dict[str, Any]:
    """An entry, with what its headers say; a header that cannot be read makes it damaged."""
    from orchard.cli.show import headers
    from orchard.core.errors import OrchardError

    row = entry.to_dict() | {"family": "", "quantisation": ""}
    if entry.damaged:
        return row
    try:
        facts = headers(entry.model_path)
    except OrchardError as error:
        return row | {"damaged": error.message}
    return row | {"family": facts["family"], "quantisation": facts["quantisation"]}
