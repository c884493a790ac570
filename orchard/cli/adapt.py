"""`orchard adapt MODEL DATA --out FOLDER`: samples become an adapter in a package; `--check` looks at the samples alone."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard.cli.common import human_bytes, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.recipes.adapt import Adapted, Checked

SHOWN = 20
"""Problems that `--check` prints; `--json` has them all."""


class Method(StrEnum):
    lora = "lora"
    dora = "dora"
    rslora = "rslora"
    qlora = "qlora"


class OnBad(StrEnum):
    stop = "stop"
    skip = "skip"


def adapt(
    model: Annotated[str, typer.Argument(help="A model of the library, a GGUF file or a model folder.")],
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Samples: .jsonl files or folders of them.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The package to write.", show_default=False)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Look at the samples, say what is wrong, train nothing.")
    ] = False,
    method: Annotated[
        Method, typer.Option("--method", help="qlora keeps the model packed: less memory.")
    ] = Method.lora,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=1, help="Of the two matrices beside each.")] = 32,
    epochs: Annotated[float, typer.Option("--epochs", metavar="N", help="How often each sample is seen.")] = 3,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Updates, in place of --epochs.")
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option("--held-out", metavar="FILE|SHARE", help="Samples to measure with; a tenth unless given."),
    ] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="Also teach a small model to guess for it: faster answers.")
    ] = False,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Its name; the folder's unless given.")] = "",
    author: Annotated[str, typer.Option("--author", metavar="TEXT", help="Who made it.")] = "",
    description: Annotated[str, typer.Option("--description", metavar="TEXT", help="What it is for.")] = "",
    licence: Annotated[str, typer.Option("--licence", "--license", metavar="TEXT", help="Such as apache-2.0.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set anything in the run's config; may be repeated."),
    ] = None,
    on_bad: Annotated[OnBad, typer.Option("--on-bad", help="At a line that cannot be learnt from.")] = OnBad.stop,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same adapter.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a package that is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while it works.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Train an adapter on samples. An interrupted run goes on with the same command.

    The package is a PEFT folder with sums, a card, and the signature of the model it is for; docs/adapt.md says what samples
    look like.
    """
    model, data = _sorted_out(model, data)
    if out is None and not check:
        raise UsageError("where to?", hint="--out FOLDER; or --check, to look at the samples only")
    from orchard.weights.library import Library

    Library().resolve(model)  # a name that is not there is refused before torch is imported
    from orchard.cli.process import import_torch

    import_torch()
    from orchard.recipes import adapt as work
    from orchard.recipes.package import About

    wishes: dict[str, Any] = {"method": method.value, "rank": rank, "epochs": epochs, "steps": steps, "device": device}
    wishes |= {"held_out": held_out, "settings": settings or (), "seed": seed}
    if check:
        found = work.check(model, data, **wishes)
        print_json(found.to_dict()) if as_json else _print_check(found)
        return 1 if found.looked.problems or not found.train else 0
    assert out is not None
    about = About(name, author, description, licence)
    speaks = not (quiet or as_json)
    try:
        made = work.adapt(
            model,
            data,
            out,
            draft=draft,
            about=about,
            on_bad=on_bad.value,
            force=force,
            told=[_Lines()] if speaks and not sys.stderr.isatty() else (),
            say=note if speaks else None,
            **wishes,
        )
    except KeyboardInterrupt:
        note("stopped; the same command goes on where it was")
        raise
    print_json(made.to_dict()) if as_json else _print(made, model)
    return 0


def _sorted_out(model: str, data: list[str]) -> tuple[str, list[str]]:
    """The model comes first; where the samples do, nobody has to guess."""
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    if model.endswith(endings) and not data[-1].endswith(endings):
        return data[-1], [model, *data[:-1]]
    return model, data


class _Lines:
    """Off a terminal: a line every quarter of a minute, in place of the bar."""

    def __init__(self) -> None:
        self.next = time.monotonic() + 15

    def __call__(self, step: int, point: Any) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + 15
            note(f"step {step:,}: loss {point['loss']:.4f}, {point['tokens/s']:,.0f} tokens a second")


def _print(made: Adapted, model: str) -> None:
    from orchard.recipes.adapt_measure import told
    from orchard.weights.package import DRAFT

    package = made.package
    size = sum(one.bytes for one in package.files.values())
    print(f"{package.path}: {package.method}, rank {package.rank}, {human_bytes(size)}, {_time(made.seconds)}")
    for label, value in told(made.losses, made.answers):
        print(f"  {label}: {value}")
    if DRAFT in package.files:
        print(f"  draft model: {human_bytes(package.files[DRAFT].bytes)}")
    for line in made.notes:
        note(f"note: {line}")
    named = "" if model == "smollm2" else f"--model {model} "
    note(f'next: orchard respond {named}--adapter {package.path} "…"')
    note(f"      orchard export {model} --to merged.gguf --format gguf --adapter {package.path} --merge")


def _print_check(found: Checked) -> None:
    looked = found.looked
    more = f", {len(looked.rows):,} rows" if len(looked.rows) != looked.samples else ""
    print(f"samples      {looked.samples:,} good{more}, {len(looked.problems):,} bad, {looked.repeated:,} repeated")
    if looked.samples:
        print(f"tokens       {looked.tokens:,}, of which {looked.learnt:,} are learnt")
        print(f"longest      {looked.longest:,} tokens, {looked.longest_at}")
        print(f"learnt from  {found.train:,} rows, {found.held:,} held out")
        print(f"training     {found.steps:,} steps in {found.dtype}, about {_time(found.seconds)} on this machine")
    for problem in looked.problems[:SHOWN]:
        print(f"{problem.reason:<12} {problem.message}")
    if len(looked.problems) > SHOWN:
        rest = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(looked.reasons.items()))
        print(f"… {len(looked.problems) - SHOWN:,} more (--json lists them); in all: {rest}")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
