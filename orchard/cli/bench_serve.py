"""`orchard bench serve`: how a server behaves under load, ours or anybody's that speaks OpenAI's protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard.cli.common import console, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.bench.load.measure import Outcome
    from orchard.bench.load.plan import Load

KEY = "ORCHARD_API_KEY"

UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The server's base address. Without one, our own is started for the run."),
]
NameOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="The model to ask for: smollm2, with --url the server's first."),
]
KeyOption = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help=f"A file that holds the key; default: {KEY}.")
]
RateOption = Annotated[
    float | None, typer.Option(metavar="R", help="Requests that arrive in a second, at random times fixed beforehand.")
]
ClientsOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Clients that send one request after another: 8, unless there is a rate."),
]
RequestsOption = Annotated[int | None, typer.Option(metavar="N", help="How many requests: 64, unless there is a time.")]
SecondsOption = Annotated[float | None, typer.Option(metavar="S", help="Send no more requests after this time.")]
PromptOption = Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt, as the server counts them.")]
MaxOption = Annotated[int, typer.Option(metavar="N", help="The longest answer, in tokens.")]
SharedOption = Annotated[int, typer.Option(metavar="T", help="So many tokens of all prompts are the same.")]
EndpointOption = Annotated[str, typer.Option(metavar="NAME", help="chat or completions.")]
TtftOption = Annotated[
    float | None, typer.Option("--target-ttft", metavar="MS", help="For goodput: milliseconds to the first text.")
]
ItlOption = Annotated[
    float | None,
    typer.Option("--target-itl", metavar="MS", help="For goodput: milliseconds for each further token of an answer."),
]
TimeoutOption = Annotated[float, typer.Option(metavar="S", help="Give up on a request after this time.")]
ExtraOption = Annotated[str | None, typer.Option(metavar="JSON", help="Fields to put into every request.")]
SaveOption = Annotated[bool, typer.Option("--save", help="Keep the Report in results/bench/load.json (in a checkout).")]
PlanSeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same prompts and arrivals.")]


def serve(
    url: UrlOption = None,
    model: NameOption = None,
    api_key_file: KeyOption = None,
    rate: RateOption = None,
    clients: ClientsOption = None,
    requests: RequestsOption = None,
    seconds: SecondsOption = None,
    prompt_tokens: PromptOption = 128,
    max_tokens: MaxOption = 64,
    shared_prefix: SharedOption = 0,
    endpoint: EndpointOption = "chat",
    target_ttft: TtftOption = None,
    target_itl: ItlOption = None,
    timeout: TimeoutOption = 300.0,
    extra: ExtraOption = None,
    seed: PlanSeedOption = 0,
    save: SaveOption = False,
    as_json: JsonOption = False,
) -> None:
    """Send requests to a server and measure its answers. Exit code 1 when not one request was answered."""
    from orchard.bench.load.plan import Load
    from orchard.bench.load.report import TARGET, place, report, table

    load = Load(
        model=model or ("" if url else "smollm2"),
        endpoint=endpoint,
        rate=rate,
        clients=clients,
        requests=requests,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        shared_prefix=shared_prefix,
        seed=seed,
        target_ttft=None if target_ttft is None else target_ttft / 1e3,
        target_itl=None if target_itl is None else target_itl / 1e3,
        timeout=timeout,
        extra=_fields(extra),
    )
    kept = place(TARGET if save else None)
    outcome, address = _measured(load, url, _key(api_key_file))
    found = report(outcome, address)
    if as_json:
        print_json(found.to_dict())
    else:
        console().print(table(found))
    if kept is not None:
        note(f"wrote {found.save(kept)}")
    if not any(sample.ok for sample in outcome.samples):
        raise typer.Exit(1)


def _measured(load: Load, url: str | None, key: str) -> tuple[Outcome, str]:
    from orchard.bench.load import own

    if url is not None:
        return _run(load, url, key), url
    from orchard.weights.library import Library

    Library().resolve(load.model)  # a name that is not there is refused here, in our words
    port = own.free_port()
    note(f"starting orchard serve {load.model} on port {port}")
    with own.serving(own.command(load.model, port), port, ready="/ready") as served:
        return _run(load, served.url, key), "orchard serve"


def _run(load: Load, url: str, key: str) -> Outcome:
    import asyncio

    from orchard.bench.load.client import Endpoint
    from orchard.bench.load.measure import run
    from orchard.core.progress import progress

    async def measured() -> Outcome:
        endpoint = Endpoint(url, key=key)
        try:
            with progress("requests", total=load.count) as advance:
                return await run(load, endpoint, lambda sample: advance(1))
        finally:
            endpoint.close()

    return asyncio.run(measured())


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get(KEY, "")
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the key in {file} cannot be read", hint="give a text file that holds the key") from error
    if not key or any(not 32 < ord(letter) < 127 for letter in key):
        raise UsageError(f"{file} holds no key", hint="it must hold one line: the key")
    return key


def _fields(text: str | None) -> dict[str, Any]:
    import json

    try:
        fields = json.loads(text) if text else {}
    except ValueError as error:
        raise UsageError(f"--extra is no JSON: {error}", hint="""such as --extra '{"top_p": 0.9}'""") from error
    if not isinstance(fields, dict):
        raise UsageError("--extra is no JSON object", hint="""such as --extra '{"top_p": 0.9}'""")
    return fields
