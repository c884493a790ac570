"""The verbs of `orchard` as typer knows them. Importing this costs typer; their work is imported inside their functions."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard import __version__
from orchard.cli import (
    adapt,
    bench,
    chat,
    compress,
    doctor,
    export,
    pull,
    respond,
    rm,
    schema,
    serve,
    show,
    study,
    train,
)
from orchard.cli import list as list_verb

app = typer.Typer(
    name="orchard",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("respond")(respond.respond)
app.command("chat")(chat.chat)
app.command("schema")(schema.schema)
app.command("pull")(pull.pull)
app.command("list")(list_verb.list_models)
app.command("show")(show.show)
app.command("rm")(rm.rm)
app.command("train")(train.train)
app.command("adapt")(adapt.adapt)
app.command("compress")(compress.compress)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("study")(study.study)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Run, inspect and study open models on your own machine."""
    if version:
        typer.echo(f"orchard {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
