"""`orchard export MODEL --to PATH --format hf|gguf|orchard|peft`: a model in another format, if it is still the same."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli.common import human_bytes, note, print_json
from orchard.cli.options import JsonOption

if TYPE_CHECKING:
    from orchard.session.export import Exported


class Format(StrEnum):
    hf = "hf"
    gguf = "gguf"
    orchard = "orchard"
    peft = "peft"


class Type(StrEnum):
    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


def export(
    model: Annotated[str, typer.Argument(help="A model of the library, a GGUF or .orchard file, or a model folder.")],
    to: Annotated[Path, typer.Option("--to", metavar="PATH", help="The file or the folder to write.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format", help="A Hugging Face folder, a GGUF file, a compressed file (.orchard), or an adapter alone."
        ),
    ],
    type: Annotated[
        Type | None,
        typer.Option("--type", help="Of the weights; a folder keeps its own, a GGUF file gets f16, an adapter f32."),
    ] = None,
    adapter: Annotated[
        list[Path] | None, typer.Option("--adapter", metavar="PATH", help="An adapter's folder; may be repeated.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapters, and a compressed model's own side paths, to the weights.")
    ] = False,
    unmerge: Annotated[
        bool, typer.Option("--unmerge", help="Take adapters out of weights that they were merged into.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0.0,
            help="Let scores differ by this share of the largest; see docs/export.md.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there, once the new one has passed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while it works.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model in another format, and check that it is still the same model."""
    from orchard.weights.library import Library

    Library().resolve(model)  # a name that is not there is refused before torch is imported
    from orchard.cli.process import import_torch

    import_torch()
    from orchard.session.export import export as write

    facts = write(
        model,
        to,
        format=format.value,
        type=None if type is None else type.value,
        adapters=adapter or (),
        merge=merge,
        unmerge=unmerge,
        force=force,
        tolerance=tolerance,
        say=None if quiet or as_json else note,
    )
    if as_json:
        print_json(facts.to_dict())
    else:
        _print(facts)


def _print(facts: Exported) -> None:
    parity = facts.parity
    print(f"{facts.path}: {human_bytes(facts.bytes)}, {facts.format} {facts.type}")
    print(f"scores       at most {parity.max_difference:.3g} apart, {parity.mean_difference:.3g} on average")
    print(
        f"divergence   {parity.kl:.3g} nats; the same choice at {parity.same_choice:.1%} of {parity.positions} places"
    )
    limit = "none for a mixture" if parity.limit is None else f"{parity.limit:g}"
    print(
        f"limits       one score {limit}, {parity.scaled_difference:.3g} found; mean {parity.mean_limit:g}, "
        f"{parity.scaled_mean:.3g} found"
    )
    if parity.raised:
        print("             (raised with --tolerance, beyond the type's own)")
    print(f"tensors      {parity.tensors}; worst {parity.worst_tensor or 'none'}, {parity.worst_tensor_error:.3g} off")
    if facts.texts:
        print(
            f"words        tokens of {facts.texts} texts and {facts.conversations} conversations, template, ids: the same"
        )
    for line in facts.notes:
        note(f"note: {line}")
