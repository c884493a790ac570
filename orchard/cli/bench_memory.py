"""`orchard bench memory MODEL`: what a model remembers of long conversations, under which budget, how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchard.cli.common import console, note, print_json
from orchard.cli.options import JsonOption


def memory(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A pulled model, or a file or folder.")] = "smollm2",
    policy: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="What stays: full, recent, snap, keydiff, kvzip, episodic. Default: all."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Tokens (512), a compression (8x) or bytes (16MB). Default: 8x,4x."),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B", help="How keys and values are kept: own, plain, int8, int4, or a step: kv-commvq:file=PATH."
        ),
    ] = None,
    owner: Annotated[
        list[str] | None,
        typer.Option(metavar="STEP", help="Whose keys and values layers read: own, share-kv:last=10; may be repeated."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="recall, locomo:PATH, realtalk:PATH. Default: recall.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=64, help="Tokens of a conversation.")] = 2048,
    talks: Annotated[int, typer.Option(metavar="N", min=1, help="Conversations of each task.")] = 2,
    questions: Annotated[int, typer.Option(metavar="N", min=1, help="Questions about each.")] = 24,
    block: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens read before some must go: as many as the budget.")
    ] = None,
    sinks: Annotated[int, typer.Option(metavar="N", min=0, help="The first so many tokens always stay.")] = 4,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Caches that `episodic` makes.")] = 4,
    medoids: Annotated[
        int, typer.Option(metavar="N", min=1, help="Pieces of conversation that speak for each of them.")
    ] = 4,
    embedder: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What compares texts: a model, or lexical. Default: minilm where it is."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same conversations.")] = 0,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw accuracy against bytes (SVG).")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the Report and its chart in results/bench (in a checkout).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a model about long conversations that it remembers in little memory. Ctrl-C keeps what is complete.

    Exit code 1 when a claim that was tested fails."""
    from orchard.bench.memory import run_and_save
    from orchard.bench.memory_chart import curves
    from orchard.bench.memory_options import Options, named, shares
    from orchard.bench.memory_report import table
    from orchard.core.files import write_text

    usual = Options()
    options = Options(
        model=model,
        policies=shares(policy, usual.policies),
        budgets=shares(budget, usual.budgets),
        codecs=tuple(dict.fromkeys(one for each in codec or () for one in named(each))) or usual.codecs,
        owners=tuple(dict.fromkeys(owner or usual.owners)),
        tasks=shares(tasks, usual.tasks),
        tokens=tokens,
        talks=talks,
        questions=questions,
        block=block,
        sinks=sinks,
        episodes=episodes,
        medoids=medoids,
        embedder=embedder,
        seed=seed,
    )
    bench, report, places = run_and_save(options, save=save)
    if chart is not None:
        write_text(chart, curves(report))
        places = [*places, chart]
    if as_json:
        print_json(report.to_dict())
    else:
        console().print(table(list(bench.rows.values())))
        for claim in report.claims:
            console().print(f"{'holds' if claim.passed else 'FAILS'}  {claim.statement}: {_number(claim.value)}")
        for line in report.notes:
            note(line)
    for place in places:
        note(f"wrote {place}")
    if bench.interrupted:
        raise typer.Exit(130)
    if any(not claim.passed for claim in report.claims):
        raise typer.Exit(1)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
