"""Options that several verbs have, as typer reads them."""

from __future__ import annotations

from typing import Annotated

import typer

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="A model of the library, a GGUF file or a model folder.")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="NAME",
        help="A smaller model of the same vocabulary that guesses tokens; answers stay the same. `none`: not even its own.",
    ),
]
ExpertsBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--experts-budget",
        metavar="SIZE",
        help="Leave a mixture's experts on disk and keep no more of them in memory than this, such as 200MB.",
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system", "--instructions", metavar="TEXT", help="Instructions the model gets before the first message."
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", metavar="N", min=1, help="The longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", metavar="X", min=0.0, help="0 takes the likeliest token; higher is more varied."),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample among the k likeliest tokens.")
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", min=0.0, max=1.0, help="Sample among the likeliest tokens that sum to p."),
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", min=0.0, max=1.0, help="Drop tokens below this share of the likeliest."),
]
RepetitionOption = Annotated[
    float | None,
    typer.Option("--repetition-penalty", metavar="X", min=0.01, help="Above 1, tokens already there get less likely."),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Same seed, same answer; without one it is drawn anew.")
]
OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline", envvar="ORCHARD_OFFLINE", show_envvar=False, help="Never use the network; only `pull` would."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

# What goes through a session: an answer of a given form, tools, adapters, guardrails.
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="FILE|MODULE:CLASS",
        help="Hold the answer to a JSON Schema, or to a class of yours (its module is imported, from this folder too).",
    ),
]
ChoicesOption = Annotated[
    str | None, typer.Option("--choices", metavar="A,B", help="Hold the answer to one of these texts.")
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="Hold the answer to a regular expression.")
]
ToolOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tool",
        metavar="MODULE:FUNCTION",
        help="A function of yours that the model may call (its module is imported, from this folder too); may be repeated.",
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="FOLDER", help="A PEFT LoRA adapter to apply; may be repeated."),
]
GuardrailsOption = Annotated[
    str | None,
    typer.Option(
        "--guardrails",
        metavar="MODE",
        help="How prompt and answer are checked: default, permissive, strict, off. Unless given, `default` in a session "
        "(chat, and with the options above) and `off` for a plain prompt.",
    ),
]
NoGuardrailsOption = Annotated[bool, typer.Option("--no-guardrails", help="The same as --guardrails off.")]
