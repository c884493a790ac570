"""What comes of a compression: the file, read back and measured; a Report with curves; a card; and all of it as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError
from orchard.core.files import write_text
from orchard.core.report import Bound, Claim, Report, Value
from orchard.recipes.compressing.card import card
from orchard.recipes.compressing.measure import Measured
from orchard.recipes.compressing.runner import Outcome, Runner, halve_vectors
from orchard.recipes.compressing.sizes import read_per_token
from orchard.recipes.compressing.work import read_model
from orchard.session.export_place import placed, size_of
from orchard.session.save import save_built
from orchard.train.shown import JSON, Kept
from orchard.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from orchard.weights.compressed_bits import Accounting


class NothingGood(OrchardError):
    """No step left a model that the rule allows, so there is nothing to write."""

    code = "nothing-good"


@dataclass(frozen=True)
class Compressed:
    """What came of it. `facts` is all of it as plain data."""

    path: Path
    report: Report
    measured: Measured
    bytes: int
    facts: dict[str, Any]

    @property
    def bits(self) -> float:
        """Per weight of the original, all in."""
        return float(self.facts["bits_per_weight"])

    @property
    def stopped(self) -> str | None:
        """Why it ended before the plan did."""
        said: str | None = self.facts["stopped"]
        return said

    def to_dict(self) -> dict[str, Any]:
        return self.facts


def finished(
    runner: Runner, outcome: Outcome, made: dict[str, Any], target: Path, *, force: bool, seconds: float
) -> Compressed:
    """Write the last good model, read it back, measure what was read, and only then give it its name."""
    if not outcome.good:
        raise NothingGood(
            f"nothing is written: {outcome.stopped}",
            hint=f"try a milder plan, more tokens or a looser --stop; what was done is in {runner.work.folder}",
        )
    runner.tell(f"writing {target.name}")
    decoder = runner.work.model(outcome.good, runner.settings.device)
    halve_vectors(decoder, matrices=True)
    made = {**made, "plan": runner.plan.words[: outcome.good]}
    built = replace(runner.built, decoder=decoder.cpu())
    with placed(target, force) as place:
        save_built(built, runner.tokenizer, runner.source, place.path, None, made)
        read = read_model(place.path, runner.settings.device)
        found = runner.measure(read, outcome.texts)
        with open_checkpoint(place.path) as checkpoint:
            counted, licence = checkpoint.accounting, checkpoint.licence  # type: ignore[attr-defined]
        place.keep()
    reads = read_per_token(decoder.config.complete())
    facts = _facts(runner, outcome, made["from"], target, found, counted, reads, licence, seconds)
    report = _report(runner, outcome, target, found, facts)
    write_text(Path(facts["card"]), card(facts))
    kept = Kept(runner.work.folder)
    if not kept(lambda: report, last=True):
        facts["notes"].append(f"the Report could not be written: {kept.problem}")
    runner.work.finish(facts)
    return Compressed(target, report, found, target.stat().st_size, facts)


def is_done(facts: dict[str, Any], target: Path, folder: Path) -> bool:
    """Whether everything that a finished compression left is still there."""
    return target.is_file() and target.stat().st_size == facts["bytes"] and (folder / JSON).is_file()


def told_again(facts: dict[str, Any], target: Path, folder: Path) -> Compressed:
    """Of a compression that is done: the same again."""
    report = Report.load(folder / JSON)
    return Compressed(target, report, Measured.from_dict(facts["measured"]), target.stat().st_size, facts)


# Inside -----------------------------------------------------------------------------------------------------------------


def _facts(
    runner: Runner,
    outcome: Outcome,
    model: str,
    target: Path,
    found: Measured,
    counted: Accounting,
    reads: int,
    licence: str | None,
    seconds: float,
) -> dict[str, Any]:
    before = runner.foreseen.original
    notes = [f"{facts['step']}: {note}" for facts in outcome.steps for note in facts["notes"]]
    return {
        "path": str(target),
        "model": model,
        "licence": licence,
        "plan": runner.plan.words,
        "kept_steps": outcome.good,
        "stopped": outcome.stopped,
        "bytes": counted.total,
        "original_bytes": size_of(runner.source),
        "bits_per_weight": round(counted.bits_per_weight, 4),
        "accounting": counted.to_dict(),
        "bytes_read_per_token": reads,
        "original_bytes_read_per_token": before.read,
        "kv_bytes_per_token": counted.kv_bytes_per_token,
        "original_kv_bytes_per_token": before.kv,
        "measured": found.to_dict(),
        "original_tasks": outcome.tasks,
        "steps": outcome.steps,
        "expected": runner.foreseen.to_dict(),
        "budget": None if runner.plan.budget is None else str(runner.plan.budget),
        "budget_bytes": runner.foreseen.budget,
        "stop": [str(rule) for rule in runner.plan.stop],
        "tokens": sum(facts["tokens"] for facts in outcome.steps),
        "own_text": not runner.settings.files or runner.settings.own > 0,
        "text": list(runner.settings.files),
        "seed": runner.settings.seed,
        "seconds": round(seconds, 1),
        "card": str(target.with_suffix(".md")),
        "report": str(runner.work.folder / JSON),
        "notes": notes,
    }


def _report(runner: Runner, outcome: Outcome, target: Path, found: Measured, facts: dict[str, Any]) -> Report:
    one = found.all
    values: dict[str, Any] = {
        "bytes": Value(facts["bytes"], "bytes"),
        "bits per weight": Value(facts["bits_per_weight"], "bits", note="the whole file over the original's weights"),
        "size ratio": Value(facts["bytes"] / facts["original_bytes"], note="to the original's files"),
        "kv bytes per token": Value(facts["kv_bytes_per_token"], "bytes"),
        "kv ratio": Value(facts["kv_bytes_per_token"] / max(1, facts["original_kv_bytes_per_token"])),
        "loss": Value(one.ratio, note=f"over the original's, on {one.tokens:,} held-out tokens"),
        "kl": Value(one.kl, "nats"),
        "agreement": Value(one.agreement),
        "tokens": Value(facts["tokens"], note="learnt from"),
    }
    for kind, each in found.kinds.items():
        values |= {f"loss, {kind}": each.ratio, f"kl, {kind}": each.kl, f"agreement, {kind}": each.agreement}
    for name, score in found.tasks.items():
        values[f"task, {name}"] = Value(score, note=f"the original: {outcome.tasks.get(name, 0):.3f}")
    if found.tasks:
        values["tasks"] = found.values()["tasks"]
    claims = [rule.claim() for rule in runner.plan.stop]
    if facts["budget_bytes"] is not None:
        bound = Bound("<=", facts["budget_bytes"])
        claims.append(Claim("budget", "the file is within its budget", "bytes", bound))
    stopped = [f"stopped: {outcome.stopped}; kept: the model after step {outcome.good}"] if outcome.stopped else []
    return Report.record(
        "compress",
        target.stem,
        values=values,
        claims=claims,
        seed=runner.settings.seed,
        series=_curves(outcome),
        config={"model": facts["model"], "plan": facts["plan"], "budget": facts["budget"], "stop": facts["stop"]},
        wall_time=facts["seconds"],
        notes=[*stopped, *facts["notes"]],
    )


def _curves(outcome: Outcome) -> dict[str, list[Any]]:
    """What was measured after each step, and while learning, over all tokens that were learnt from."""
    curves: dict[str, list[Any]] = {}
    for number, facts in enumerate(outcome.steps, 1):
        for kind, one in facts["measured"]["kinds"].items():
            curves.setdefault(f"loss ratio after each step, {kind}", []).append([number, one["ratio"]])
            curves.setdefault(f"KL after each step, {kind}", []).append([number, one["kl"]])
    before = 0.0
    for facts in outcome.steps:
        parts = {"KL while learning": facts["curve"]}
        parts |= {f"KL while learning, held out, {kind}": points for kind, points in facts["held_out"].items()}
        for name, points in parts.items():
            curves.setdefault(name, []).extend([before + at, value] for at, value in points)
        before += max((points[-1][0] for points in parts.values() if points), default=0.0)
    return {name: points for name, points in curves.items() if points}
