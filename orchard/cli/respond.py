"""`orchard respond "…"`: one prompt, one answer, written as it comes; plainly, or through a session."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchard.cli import common
from orchard.cli.answer import respond_to
from orchard.cli.guided import Ways, respond_in_session
from orchard.cli.options import (
    AdapterOption,
    ChoicesOption,
    DraftOption,
    ExpertsBudgetOption,
    GuardrailsOption,
    JsonOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    NoGuardrailsOption,
    OfflineOption,
    RegexOption,
    RepetitionOption,
    SchemaOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    ToolOption,
    TopKOption,
    TopPOption,
)


def respond(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; - or nothing reads standard input.", show_default=False)
    ] = None,
    model: ModelOption = "smollm2",
    draft: DraftOption = None,
    experts_budget: ExpertsBudgetOption = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    schema: SchemaOption = None,
    choices: ChoicesOption = None,
    regex: RegexOption = None,
    tool: ToolOption = None,
    adapter: AdapterOption = None,
    guardrails: GuardrailsOption = None,
    no_guardrails: NoGuardrailsOption = False,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt."""
    ways = Ways.of(schema, choices, regex, tool, adapter, guardrails, no_guardrails)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "seed": seed,
    }
    loading: dict[str, Any] = {"draft": draft, "experts_budget": experts_budget}
    if not ways.need_a_session():
        respond_to(prompt, model=model, **loading, system=system, offline=offline, as_json=as_json, **sampling)
        return
    common.go_offline(offline)
    text, settings = common.read_prompt(prompt), common.sampling(**sampling)
    respond_in_session(text, name=model, **loading, system=system, settings=settings, ways=ways, as_json=as_json)
