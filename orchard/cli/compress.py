"""`orchard compress MODEL PLAN… --to FILE.orchard`: a smaller form of a model, by a plan, measured after every step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard.cli.common import human_bytes, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.recipes.compress import Compressed


def compress(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of the library, a GGUF file or a model folder.", show_default=False),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN...", help="A ready plan, steps (name:key=value,…), or a JSON file."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The file to write: ….orchard.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="Of the whole file: 3.2bpw or 58MB.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="RULE", help="What has to hold after every step: loss<1.08, kl<0.3, agreement>0.8."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="Text to learn from, beside the model's own; may be repeated."),
    ] = None,
    reuse: Annotated[int, typer.Option("--reuse", metavar="TIMES", help="How often a token is learnt from.")] = 2,
    own: Annotated[float, typer.Option("--own", metavar="SHARE", help="With --text: how much the model writes.")] = 0.5,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="To learn from: 20M on a GPU, 100k on a CPU.")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="FILE", help="Questions to score: .jsonl of prompt, expected; or: following."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same file.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the plan would come to, and do nothing.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List ready plans and steps.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while it works.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Make a model smaller by a plan, and measure it against the original after every step.

    First it says what the plan will come to. Without --text it learns from text that the model writes itself. An interrupted run
    goes on with the same command; docs/compress.md says more.
    """
    if list_all:
        _list(as_json)
        return 0
    if model is None:
        raise UsageError("which model?", hint="orchard compress smollm2 int4 --to small.orchard; --list shows plans")
    if not plan:
        raise UsageError("by which plan?", hint="`orchard compress --list` shows ready plans and steps")
    if to is None and not dry_run:
        raise UsageError("where to?", hint="--to FILE.orchard; or --dry-run, to see what the plan would come to")
    from orchard.weights.library import Library

    Library().resolve(model)  # a name that is not there is refused before torch is imported
    from orchard.cli.process import import_torch

    import_torch()
    from orchard.recipes import compress as work
    from orchard.recipes.compressing.card import shown

    wishes: dict[str, Any] = {
        "budget": budget,
        "stop": stop or (),
        "text": text or (),
        "own": own,
        "tokens": tokens,
        "reuse": reuse,
    }
    wishes |= {"tasks": tasks, "device": device, "seed": seed, "bandwidth": _bandwidth}
    speaks = not (quiet or as_json)
    if dry_run:
        chosen, found = work.forecast(model, plan, **wishes)
        print_json({"plan": chosen.words, **found.to_dict()}) if as_json else print(shown(found))
        return 0
    assert to is not None
    try:
        made = work.compress(
            model,
            plan,
            to,
            force=force,
            told=[_Lines()] if speaks and not sys.stderr.isatty() else (),
            say=note if speaks else None,
            **wishes,
        )
    except KeyboardInterrupt:
        note("stopped; the same command goes on where it was")
        raise
    print_json(made.to_dict()) if as_json else _print(made)
    return 0


def _bandwidth(size: int) -> float | None:
    """What this machine's memory gives, measured now for a moment."""
    import os

    from orchard.bench.limits import CACHE_SET, DRAM_SET, read_bandwidth

    threads = int(os.environ.get("ORCHARD_THREADS") or os.cpu_count() or 1)
    return read_bandwidth(CACHE_SET if size <= 2 * CACHE_SET else DRAM_SET, threads, 2)


class _Lines:
    """Off a terminal: a line every quarter of a minute, in place of the bar."""

    def __init__(self) -> None:
        self.next = time.monotonic() + 15

    def __call__(self, step: int, point: Any) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + 15
            note(f"  {step:,}: KL {point['loss']:.4f}, {point['tokens/s']:,.0f} tokens a second")


def _print(made: Compressed) -> None:
    from orchard.recipes.compressing.card import columns

    facts = made.to_dict()
    share = facts["bytes"] / facts["original_bytes"]
    print(
        f"{made.path}: {human_bytes(made.bytes)} ({share:.0%} of the original), {made.bits:.2f} bits per weight, "
        f"{facts['kv_bytes_per_token']:,} bytes of keys and values a token"
    )
    kinds = {**facts["measured"]["kinds"], "all": facts["measured"]["all"]}
    rows = [
        (kind, f"{one['tokens']:,}", *(_number(one[key]) for key in ("ratio", "kl")), f"{one['agreement']:.1%}")
        for kind, one in kinds.items()
    ]
    print("\n".join(columns(("held-out text", "tokens", "loss ratio", "KL", "same token"), rows)))
    for name, score in facts["measured"]["tasks"].items():
        print(f"task {name}: {score:.1%}, the original {facts['original_tasks'].get(name, 0.0):.1%}")
    if made.stopped:
        print(f"stopped: {made.stopped}; this is the model after step {facts['kept_steps']} of {len(facts['plan'])}")
    for line in facts["notes"][:10]:
        note(f"note: {line}")
    note(f"card: {facts['card']}; report: {facts['report']}")
    note(f"next: orchard chat --model {made.path}")


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"


def _list(as_json: bool) -> None:
    from orchard.cli.process import import_torch

    import_torch()
    from orchard.recipes.base import about
    from orchard.recipes.compressing.plan import parameters
    from orchard.recipes.compressing.ready import READY
    from orchard.recipes.compressing.steps import steps

    if as_json:
        plans = {name: {"about": one.about, "steps": one.steps, "budget": one.budget} for name, one in READY.items()}
        known = {
            name: {"about": about(one), "settings": {key: words for key, (_, words) in parameters(one).items()}}
            for name, one in steps().items()
        }
        print_json({"plans": plans, "steps": known})
        return
    print("ready plans")
    for name, ready in READY.items():
        more = f" --budget {ready.budget}" if ready.budget else ""
        print(f"  {name:<12}{ready.about}\n  {'':<12}= {' '.join(ready.steps)}{more}")
    print("\nsteps")
    for name, function in steps().items():
        taken = ", ".join(f"{key}={_default(one.default)}" for key, (one, _) in parameters(function).items())
        print(f"  {name:<12}{about(function)}\n  {'':<12}{taken}" if taken else f"  {name:<12}{about(function)}")


def _default(value: Any) -> str:
    words: dict[Any, str] = {None: "none", True: "true", False: "false", (): "[]"}
    return str(value) if type(value) in (int, float, str) else words.get(value, str(value))
