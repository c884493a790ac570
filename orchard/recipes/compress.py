"""`compress`: a plan of steps makes a model small, measured against the original after each of them.

    made = compress("smollm2", ["gptq:bits=4", "embed8"], "small.orchard")
    print(made.size.bits, made.measured.all.ratio)

Before anything is done the plan is worked out on the tree (`forecast`): sizes, keys and values, and guesses of speed, quality and
time. What is unfinished lives in a folder beside the file (`small.work`), and the same call goes on from there, whatever
interrupted it. The file is read back and measured before it gets its name; beside it lies a card (`small.md`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import ConfigError, UsageError
from orchard.core.report import Report
from orchard.recipes.adapt_plan import fast_dtype, seconds_for
from orchard.recipes.compressing.card import shown
from orchard.recipes.compressing.forecast import Bandwidth, Forecast, foresee
from orchard.recipes.compressing.measure import Measured, Tasks
from orchard.recipes.compressing.plan import Plan, read_plan
from orchard.recipes.compressing.result import Compressed, finished, is_done, told_again
from orchard.recipes.compressing.runner import Runner, Settings
from orchard.recipes.compressing.sizes import Scale
from orchard.recipes.compressing.work import Work
from orchard.session.build import Built, build
from orchard.session.export_place import size_of
from orchard.session.place import device_of
from orchard.session.save import companions
from orchard.text.tokenizer import Tokenizer
from orchard.train.trainer import Told
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed_file import ENDING
from orchard.weights.library import Library

__all__ = ["Asked", "Compressed", "Forecast", "Measured", "Report", "compress", "forecast", "take_over"]

TOKENS = {"cuda": 20_000_000, "cpu": 100_000}
"""What a plan learns from unless it says how much: about a quarter of an hour of one large GPU, or of two cores."""
ON_CPU = {"held": 3072, "looked": 8192, "length": 256, "rows": 8, "batch": 32}
ON_GPU = {"held": 65_536, "looked": 65_536, "length": 1024, "rows": 64, "batch": 256}
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Everything that may be asked for beside model, plan and target; None: what suits the device."""

    budget: str | None = None
    stop: str | Sequence[str] = ()
    text: Sequence[str | Path] = ()
    """Files to learn from and measure on, beside what the model writes."""
    own: float = 0.5
    """With files: the share of what is learnt that the model writes itself."""
    tokens: int | str | None = None
    reuse: int = 2
    """How often a token is learnt from, about: more takes less time to write, and less is learnt from each."""
    tasks: Tasks | str | Path | None = None
    """A function from a model to scores, `following` (300 checks of ours whether it does what it is told: see
    `orchard.evals.following`), or a file of questions (see `orchard.evals.answers`)."""
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    held: int | None = None
    """Tokens of each kind of text that are held out."""
    looked: int | None = None
    """Tokens that transforms look at."""
    length: int | None = None
    """Tokens of a row."""
    rows: int | None = None
    """Rows of a step of training."""


def compress(
    model: str | Path,
    plan: str | Sequence[str] | Plan,
    to: str | Path,
    *,
    force: bool = False,
    told: Iterable[Told] = (),
    say: Say | None = None,
    bandwidth: Bandwidth | None = None,
    **asked: Any,
) -> Compressed:
    """Make a model of the library (or of a file or folder) small, by a plan, and write it as one file. `asked`: see `Asked`.
    `force`: replace a file that is there. `told` hears of every step of training, `say` of what is done. `bandwidth`: how fast
    this machine reads, for a guess of speed."""
    begun, wishes, target = time.perf_counter(), Asked(**asked), Path(to).absolute()
    tell = say or (lambda line: None)
    chosen = _plan(plan, wishes)
    source = Library().resolve(str(model))
    _check_target(target, source)
    settings = _settings(chosen, wishes)
    work = Work(target, chosen.words)
    record = _record(source, chosen, wishes, settings)
    mine = work.is_mine(record)
    if mine and (before := work.result()) is not None and is_done(before, target, work.folder):
        return told_again(before, target, work.folder)
    if target.exists() and not (force or mine):
        raise UsageError(f"{target} is there already", hint="choose another name, or replace it with --force")
    tokenizer, built = _original(source)
    made = _made(str(model), source, chosen)
    foreseen, scale = _forecast(chosen, built, tokenizer, source, made, settings, bandwidth)
    tell(f"what the plan will come to:\n{shown(foreseen)}")
    with work.locked():
        work.begin(record)
        runner = Runner(chosen, built, tokenizer, source, scale, foreseen, work, settings, tell, tuple(told))
        outcome = runner.run()
        found = finished(runner, outcome, made, target, force=force or mine, seconds=time.perf_counter() - begun)
    gc.collect()
    return found


def take_over(
    model: str | Path, plan: str | Sequence[str] | Plan, to: str | Path, *, other: str | Path, **asked: Any
) -> int:
    """Begin a compression with what one under way for the file `other` has done, as far as both plans begin alike: its text and
    its first steps. How many steps that is; `compress` with the same arguments goes on."""
    wishes = Asked(**asked)
    chosen, source = _plan(plan, wishes), Library().resolve(str(model))
    record = _record(source, chosen, wishes, _settings(chosen, wishes))
    theirs = Work(Path(other).absolute(), []).folder
    return Work(Path(to).absolute(), chosen.words).take_over(theirs, record)


def forecast(
    model: str | Path, plan: str | Sequence[str] | Plan, *, bandwidth: Bandwidth | None = None, **asked: Any
) -> tuple[Plan, Forecast]:
    """What a plan would come to, without doing it."""
    wishes = Asked(**asked)
    chosen = _plan(plan, wishes)
    source = Library().resolve(str(model))
    settings = _settings(chosen, wishes)
    tokenizer, built = _original(source, whole=False)
    made = _made(str(model), source, chosen)
    return chosen, _forecast(chosen, built, tokenizer, source, made, settings, bandwidth)[0]


# Inside -----------------------------------------------------------------------------------------------------------------


def _plan(plan: str | Sequence[str] | Plan, wishes: Asked) -> Plan:
    if isinstance(plan, Plan):
        return plan
    return read_plan(plan, budget=wishes.budget, stop=wishes.stop, tokens=wishes.tokens)


def _check_target(target: Path, source: Path) -> None:
    if target.suffix != ENDING:
        raise UsageError(f"{target.name} for a compressed model", hint=f"its name ends in {ENDING}")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}", hint="make it first")
    if target.is_dir() or target.resolve() == source.resolve():
        raise UsageError(f"{target} is a folder, or what is read from", hint="choose another name")


def _settings(plan: Plan, wishes: Asked) -> Settings:
    place = device_of(wishes.device)
    gpu = place.type == "cuda"
    if not 0 <= wishes.own <= 1:
        raise UsageError(f"own is {wishes.own}", hint="use a share from 0 to 1")
    if wishes.reuse < 1:
        raise UsageError(f"reuse is {wishes.reuse}", hint="use a whole number from 1")
    tasks = wishes.tasks
    if isinstance(tasks, str | Path):
        tasks = _tasks(tasks)
    files = tuple(str(path) for path in wishes.text)
    if files:
        from orchard.recipes.files import refuse_missing, rows_of

        refuse_missing(rows_of(list(files), seed=wishes.seed))
    usual = ON_GPU if gpu else ON_CPU
    return Settings(
        tokens=plan.tokens or TOKENS["cuda" if gpu else "cpu"],
        held=wishes.held or usual["held"],
        looked=wishes.looked or usual["looked"],
        length=wishes.length or usual["length"],
        rows=wishes.rows or usual["rows"],
        batch=usual["batch"],
        files=files,
        own=wishes.own,
        reuse=wishes.reuse,
        tasks=tasks,
        device=place,
        dtype=fast_dtype(wishes.device) if wishes.dtype == "auto" else wishes.dtype,
        seed=wishes.seed,
    )


def _tasks(named: str | Path) -> Tasks:
    """The checks of our own by their name, or a file of questions."""
    from orchard.evals.answers import read_questions
    from orchard.recipes.compressing.follows import FOLLOWING, follows

    return follows if str(named) == FOLLOWING else read_questions(named)


def _record(source: Path, plan: Plan, wishes: Asked, settings: Settings) -> dict[str, Any]:
    """All that the result depends on."""
    sizes = {str(Path(path).absolute()): size_of(Path(path)) for path in settings.files if Path(path).exists()}
    tasks = wishes.tasks
    return {
        "model": [str(source), size_of(source)],
        "plan": plan.words,
        "budget": None
        if plan.budget is None
        else f"{plan.budget.size!r} {'bpw' if plan.budget.per_weight else 'bytes'}",
        "stop": [str(rule) for rule in plan.stop],
        "tokens": settings.tokens,
        "text": sizes,
        "own": settings.own,
        "reuse": settings.reuse,
        "tasks": str(tasks) if isinstance(tasks, str | Path) else getattr(tasks, "__qualname__", None),
        "seed": settings.seed,
        "held_out": settings.held,
        "looked_at": settings.looked,
        "length": settings.length,
        "rows": settings.rows,
        "dtype": settings.dtype,
    }


def _made(model: str, source: Path, plan: Plan) -> dict[str, Any]:
    """What the file says of how it was made."""
    with open_checkpoint(source) as checkpoint:
        licence = checkpoint.licence
    return {"from": model, "plan": plan.words, **({"licence": licence} if licence else {})}


def _original(source: Path, *, whole: bool = True) -> tuple[Tokenizer, Built]:
    """The model in float32; without its weights where only its tree is asked for."""
    if not whole:
        from orchard.session.build import tokenizer_of

        with open_checkpoint(source) as checkpoint:
            with torch.device("meta"):
                decoder = checkpoint.config().build()
            return tokenizer_of(checkpoint), Built(decoder, checkpoint.family, checkpoint.hf_config)
    tokenizer, built = build(source, None, torch.float32, "cpu")
    for name, tensor in built.decoder.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise ConfigError(
                f"{source.name}: {count:,} values of {name} are not finite numbers",
                hint="the file is damaged, or training it went wrong: use another one",
            )
    return tokenizer, built


def _forecast(
    plan: Plan,
    built: Built,
    tokenizer: Tokenizer,
    source: Path,
    made: dict[str, Any],
    settings: Settings,
    bandwidth: Bandwidth | None,
) -> tuple[Forecast, Scale]:
    scale = Scale.of(built, companions(tokenizer, source), made)
    found = foresee(plan, scale, settings.tokens)
    if found.tokens:
        # Twice what side paths alone would take: all gradients, and the original is read as well.
        found = replace(
            found, seconds=2 * seconds_for(_reads(found), found.tokens, settings.dtype, settings.device.type)
        )
    if bandwidth is not None:
        rates = [bandwidth(size.read) for size in (found.original, found.size)]
        if all(rates):
            speeds = [
                float(rate or 0) / size.read for rate, size in zip(rates, (found.original, found.size), strict=True)
            ]
            found = replace(found, speed=(speeds[0], speeds[1]))
    return found, scale


def _reads(found: Forecast) -> int:
    """Weights that a token is multiplied with, in the original."""
    return found.original.read // 2
