"""`orchard respond "…"`: one prompt, one answer, written as it comes."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard.cli.answer import respond_to
from orchard.cli.options import (
    JsonOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    OfflineOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)


def respond(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; - or nothing reads standard input.", show_default=False)
    ] = None,
    model: ModelOption = "smollm2",
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt."""
    respond_to(
        prompt,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
        offline=offline,
        as_json=as_json,
    )
