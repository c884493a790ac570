"""`orchard bench engine`: this machine's figures for Orchard and its peers, side by side. And the group of all benchmarks."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard.cli.bench_experts import experts
from orchard.cli.bench_memory import memory
from orchard.cli.bench_serve import serve
from orchard.cli.common import console, note, print_json
from orchard.cli.options import JsonOption, ModelOption
from orchard.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure the engine beside its peers, a server under load, a cache of experts, or long conversations in little memory."""
    if context.invoked_subcommand is None:
        raise UsageError("which benchmark?", hint="`orchard bench engine`, `serve`, `experts TRACE` or `memory MODEL`")


@app.command("engine")
def engine(
    model: ModelOption = "smollm2",
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How often everything is measured: 5, with --quick 1.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes long.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Measure these only, such as decode,prefill,batch.")
    ] = None,
    peers_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A Python that has llama-cpp-python or transformers; may be repeated. Default: .venv-peers, then this one.",
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the Report and its chart in results/bench (in a checkout).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine beside llama.cpp and transformers. Exit code 1 when a claim that was tested fails."""
    from orchard.bench.engine import Options, run_and_save

    chosen = tuple(part.strip() for part in (only or "").split(",") if part.strip())
    options = Options(
        model=model,
        rounds=rounds if rounds is not None else 1 if quick else 5,
        quick=quick,
        only=chosen,
        peers_python=tuple(peers_python or ()),
    )
    report, places = run_and_save(options, save=save)
    if as_json:
        print_json(report.to_dict())
    else:
        from orchard.bench.table import table

        console(markup=True).print(table(report))
    for place in places:
        note(f"wrote {place}")
    if any(not claim.passed and claim.reason != "not tested" and claim.value is not None for claim in report.claims):
        raise typer.Exit(1)


app.command("serve")(serve)
app.command("experts")(experts)
app.command("memory")(memory)
