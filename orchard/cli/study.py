"""`orchard study SLUG`: run a study and print its Report."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from orchard.cli.common import console, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError


class Scale(StrEnum):
    small = "small"
    full = "full"


def study(
    slug: Annotated[str | None, typer.Argument(help="The study to run.", show_default=False)] = None,
    scale: Annotated[
        Scale, typer.Option(metavar="small|full", help="small: two CPU cores, minutes; full: one GPU.")
    ] = Scale.small,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of every random choice in the run.")] = 0,
    save: Annotated[bool, typer.Option("--save", help="Keep the Report in results/studies (in a checkout).")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study: a published claim, measured here. Exit code 1 when a claim fails."""
    from orchard.studies import available
    from orchard.studies import study as run

    if list_all:
        studies = available()
        if as_json:
            print_json(studies)
            return
        width = max(map(len, studies), default=0)
        for name, line in studies.items():
            print(f"{name:<{width}}  {line}")
        return
    if slug is None:
        raise UsageError("which study?", hint="`orchard study --list` shows them all")
    report = run(slug, scale=scale.value, seed=seed, save=save)
    if as_json:
        print_json(report.to_dict())
    else:
        console(markup=True).print(report.table())
    if not report.passed:
        raise typer.Exit(1)
