"""How many guesses of a draft model are kept, and that they change no answer: with and without an adapter and a grammar.

    python bench/draft.py --draft draft/draft.gguf                          # the adapter is made here: minutes
    python bench/draft.py --draft draft/draft.gguf --adapter FOLDER         # a PEFT folder or package that is there

Prompts are of subjects and people that neither draft nor adapter have learnt from. Each answer is written greedily by two models
that are equal but for the draft. Guesses kept are counted per call of the model that had guesses to check, at a fixed number of
guesses; the model's own token, which every call gives, is not among them. Times are of one request after the other, the two
models taking turns, with as many guesses as seem to pay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "data")]

from draft_prompts import held_out, held_out_forms  # noqa: E402
from ledger import examples  # noqa: E402

from orchard.core.report import Bound, Claim, Report, Value  # noqa: E402
from orchard.generate.constraint import Constraint  # noqa: E402
from orchard.generate.request import Answer, Request  # noqa: E402
from orchard.generate.speculative import Speculation  # noqa: E402
from orchard.recipes.draft import NAME, distil_draft  # noqa: E402
from orchard.session.model import Model, load  # noqa: E402

TARGET = ROOT / "results" / "bench" / "draft.json"
LINE = r"[0-9]{4}-[0-9]{2}-[0-9]{2} \| [A-Z][a-z]+, [A-Z]\. \| [0-9]{1,4}\.[0-9]{2} (EUR|USD|GBP) \| [A-Za-z ]{1,40}"
CELLS = ("base, free", "base, grammar", "adapter, free", "adapter, grammar")
LEAST = 1.5


def claims() -> list[Claim]:
    found = []
    for cell in CELLS:
        words = cell.replace("base", "without the adapter").replace("free", "no grammar")
        found.append(
            Claim(
                f"kept: {cell}",
                f"{words}: at least {LEAST} guesses are kept in a call",
                f"{cell}: kept per call",
                Bound(">=", LEAST),
            )
        )
        found.append(
            Claim(
                f"same: {cell}",
                f"{words}: every answer is the same as without a draft",
                f"{cell}: same",
                Bound(">=", 1.0),
            )
        )
    return found


def requests_for(cell: str, model: Model, count: int, max_tokens: int) -> list[Request]:
    """Prompts of a cell; `model` gives the ids."""
    asked: list[tuple[str, Constraint | None]]
    if cell == "base, free":
        asked = [(one.text, None) for one in held_out(count)]
    elif cell == "base, grammar":
        asked = [(one.text, Constraint.json_schema(one.schema or {})) for one in held_out_forms(count)]
    else:
        form = Constraint.regex(LINE) if "grammar" in cell else None
        learnt = {one.prompt for one in examples()[0]}
        # Not the examples that bench/adapt.py tests with: drafts were tuned while those were looked at.
        fresh = [one.prompt for one in examples(seed=7)[1] if one.prompt not in learnt]
        asked = [(prompt, form) for prompt in fresh[:count]]
    return [
        Request(tuple(model.prompt_ids(text)), max_tokens=max_tokens, constraint=form, seed=1) for text, form in asked
    ]


def measured(cell: str, plain: Model, guessing: Model, requests: Sequence[Request], length: int) -> dict[str, Value]:
    """Answers with and without guesses, one request at a time."""
    way = Speculation(kind="draft", length=length)
    kept = drafts = same = tokens = calls = 0
    for request in requests:
        before = plain.engine.answer([request])[0]
        marks = counted(guessing)
        after = guessing.engine.answer([replace(request, speculation=way)])[0]
        now = counted(guessing)
        kept, drafts = kept + now[0] - marks[0], drafts + now[1] - marks[1]
        same += _said(before) == _said(after)
        tokens, calls = tokens + after.usage.output, calls + after.usage.calls
    note = f"{len(requests)} prompts, {length} guesses in a call"
    return {
        f"{cell}: kept per call": Value(round(kept / max(drafts, 1), 3), unit="tokens", note=note),
        f"{cell}: tokens per call": Value(
            round(tokens / max(calls, 1), 3),
            unit="tokens",
            note="kept, the model's own, and those a grammar leaves no choice about",
        ),
        f"{cell}: same": Value(same / len(requests), note="share of answers that are the same, token by token"),
    }


def counted(model: Model) -> tuple[int, int]:
    """Guesses kept and calls with guesses, of all draft models of an engine so far."""
    facts = model.engine.facts().get("speculation", {}).values()
    return sum(one["kept"] for one in facts), sum(one["drafts"] for one in facts)


def _said(answer: Answer) -> tuple[object, ...]:
    return answer.ids, answer.text, answer.finish


def timed(cell: str, plain: Model, guessing: Model, requests: Sequence[Request], rounds: int) -> dict[str, Value]:
    """Tokens a second of single requests; the first round warms both up."""
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds + 1):
        for name, model in (("without", plain), ("with", guessing)):
            begun, tokens = time.perf_counter(), 0
            for request in requests:
                tokens += model.engine.answer([request])[0].usage.output
            if number:
                speeds[name].append(tokens / (time.perf_counter() - begun))
    values = {}
    for name, found in speeds.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        values[f"{cell}: tokens/s {name}"] = Value(
            round(middle, 1), unit="tokens/s", low=round(low, 1), high=round(high, 1), note="median, quartiles"
        )
    return values


def made_adapter(model: str, folder: Path) -> Path:
    """A LoRA adapter for the ledger task, as bench/adapt.py has it."""
    from orchard.recipes.adapt import adapt

    data = folder / "ledger.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(one.row()) + "\n" for one in examples()[0]))
    adapt(model, data, folder / "package")
    return folder / "package"


def with_and_without(model: str, draft: str, given: Path, work: Path, steps: int | None) -> tuple[Path, Path]:
    """The adapter twice: alone, and with a draft of its own, which is its package's or is taught here from the general one."""
    alone, own = work / "alone", work / "own"
    for folder in (alone, own):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy2(given / name, folder / name)
    if (given / NAME).is_file():
        shutil.copy2(given / NAME, own / NAME)
        return alone, own
    base = load(model, draft=draft)
    base.adapters.load(alone, "task")
    rows = [one.row() for one in examples()[0]]
    path = distil_draft(base.adapters.model("task"), rows, work / "taught", steps=steps)
    shutil.copy2(path, own / NAME)
    return alone, own


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="the general draft, a GGUF file or a name (bench/draft_train.py makes one)")
    parser.add_argument("--adapter", type=Path, help="a PEFT folder or package (default: one is made)")
    parser.add_argument("--work", type=Path, help="a folder for what is made (default: a temporary one)")
    parser.add_argument("--length", type=int, default=6, help="guesses in a call (default: 6)")
    parser.add_argument("--count", type=int, default=24, help="prompts of a cell (default: 24)")
    parser.add_argument("--timed", type=int, default=6, help="prompts whose times are taken (default: 6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, help="of the adapter's own draft")
    parser.add_argument("--only", default="", help="cells, by a part of their names")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args(arguments)
    if options.draft is None:
        parser.error("which draft? `python bench/draft_train.py --out FOLDER` makes FOLDER/draft.gguf, on a GPU")
    begun, values = time.perf_counter(), dict[str, Value]()
    cells = [cell for cell in CELLS if options.only in cell]
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        plain, guessing = load(options.model), load(options.model, draft=options.draft)
        pairs = {"base": (plain, guessing)}
        if any("adapter" in cell for cell in cells):
            given = options.adapter or made_adapter(options.model, work)
            alone, own = with_and_without(options.model, options.draft, given, work, options.steps)
            plain.adapters.load(alone, "task")
            guessing.adapters.load(own, "task")
            pairs["adapter"] = (plain.adapters.model("task"), guessing.adapters.model("task"))
        for cell in cells:
            two = pairs[cell.split(",")[0]]
            requests = requests_for(cell, plain, options.count, options.max_tokens)
            values |= measured(cell, *two, requests, options.length)
            values |= timed(cell, *two, requests[: options.timed], options.rounds)
    report = Report.record(
        "bench",
        "draft",
        values=values,
        claims=[claim for claim in claims() if claim.metric.split(":")[0] in cells],
        wall_time=round(time.perf_counter() - begun, 3),
        notes=[f"draft: {Path(options.draft).name}"],
    )
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
