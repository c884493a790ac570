"""`orchard bench experts TRACE`: how a cache of experts would do, over all policies and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchard.cli.common import console, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError


def experts(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A recorded trace; with --record it is written first.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Refuse a trace of any other model.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Let --model write some text and keep what it chooses in TRACE.")
    ] = False,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to record.")] = 256,
    prefetch: Annotated[
        str, typer.Option(metavar="NAME", help="What is read ahead: none, gates, history, threshold.")
    ] = "gates",
    lookahead: Annotated[int, typer.Option(metavar="N", min=0, help="Layers ahead.")] = 1,
    extra: Annotated[int, typer.Option(metavar="N", min=0, help="Units beyond those a gate ahead would choose.")] = 0,
    capacity: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Units in the cache; may be repeated. Default: shares of all."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Replay this policy only; may be repeated.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves (SVG).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace of chosen experts over eviction policies and cache sizes, the oracle among them."""
    from orchard.bench.experts_chart import curves
    from orchard.bench.experts_replay import Options, replay
    from orchard.bench.experts_replay import record as recorded
    from orchard.cache.experts.trace import Trace
    from orchard.core.files import write_text

    if record and model is None:
        raise UsageError("whose choices are to be recorded?", hint="name a mixture with --model")
    found = recorded(model, trace, tokens) if record and model is not None else Trace.open(trace, model=model)
    options = Options(prefetch, lookahead, extra, tuple(capacity or ()), tuple(policy or ()))
    report = replay(found, options)
    if chart is not None:
        write_text(chart, curves(report))
        note(f"wrote {chart}")
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report.series)
    if any(not claim.passed for claim in report.claims):
        raise typer.Exit(1)


def _show(series: dict[str, list[float]]) -> None:
    from rich.table import Table

    for what in ("hit rate", "collisions", "reads"):
        table = Table("units in the cache", *(f"{size:,}" for size in series["capacity"]), title=what)
        for name, values in series.items():
            if name.endswith(f": {what}"):
                shown = [f"{value:.3f}" if what == "hit rate" else f"{value:,}" for value in values]
                table.add_row(name.partition(":")[0], *shown)
        console().print(table)
