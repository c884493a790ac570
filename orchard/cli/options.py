"""Options that several verbs have, as typer reads them."""

from __future__ import annotations

from typing import Annotated

import typer

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="A model of the library, a GGUF file or a model folder.")
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="Instructions the model gets before the first message.")
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
