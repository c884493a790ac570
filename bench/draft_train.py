"""Teach a general draft model in one command: the model answers prompts by itself, some of its layers learn to say the same.

    python bench/draft_train.py --out draft                     # a CUDA device, about eight minutes: draft/draft.gguf
    python bench/draft_train.py --out draft --small             # a CPU, a few minutes: shows that it works, guesses badly

Nothing is fetched. Prompts come from a folder (`--prompts`: .jsonl rows with "prompt" or "messages", and "schema" where the
answer is JSON of a form; .txt with one a line) or are made up here (bench/data/draft_prompts.py) and by the model itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "data")]

from draft_prompts import Prompt, held_out, held_out_forms, training, training_forms  # noqa: E402

from orchard.data.source import Sample  # noqa: E402
from orchard.generate.constraint import Constraint  # noqa: E402
from orchard.generate.engine import Engine  # noqa: E402
from orchard.generate.request import Request  # noqa: E402
from orchard.generate.speculative import Speculation  # noqa: E402
from orchard.recipes.draft import TEXT, Lessons, distil, draft_from, teacher_of, trainer_of  # noqa: E402
from orchard.recipes.draft_text import Asked, answered, invented, write_samples  # noqa: E402
from orchard.session.model import Model, load  # noqa: E402
from orchard.session.place import device_of  # noqa: E402

LARGEST = 60 << 20
"""Bytes that the file may have."""
SLOTS = 256
WRITING, TEACHING = 0.3, 0.9
"""The share of the time for text, and how much of the rest is planned for: machines are not always alone."""


def say(words: str, begun: float = time.monotonic()) -> None:
    print(f"[{time.monotonic() - begun:6.1f} s] {words}", flush=True)


def prompts_in(folder: Path) -> list[Prompt]:
    """All prompts of a folder, in the order of its files."""
    found: list[Prompt] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".txt":
            found += [Prompt(line.strip()) for line in path.read_text().splitlines() if line.strip()]
        elif path.suffix == ".jsonl":
            for line in path.read_text().splitlines():
                row = json.loads(line)
                turns = [turn for turn in row.get("messages", []) if turn.get("role") == "user"]
                text = row.get("prompt") or (turns[0]["content"] if turns else None)
                if isinstance(text, str) and text.strip():
                    found.append(Prompt(text, row.get("schema")))
    if not found:
        sys.exit(f"{folder} holds no prompts: give .jsonl rows with a prompt, or .txt files with one a line")
    return found


def asked_of(model: Model, prompts: Sequence[Prompt]) -> list[Asked]:
    made = []
    for one in prompts:
        form = None if one.schema is None else Constraint.json_schema(one.schema)
        made.append(Asked(tuple(model.prompt_ids(one.text)), constraint=form))
    return made


def write_text(model: Model, engine: Engine, options: argparse.Namespace, seconds: float) -> list[Sample]:
    """What the model says, until the time is over: most of it to free prompts, some in JSON, some to prompts of its own."""
    given = prompts_in(options.prompts) if options.prompts else None
    count = options.count or (64 if options.small else 60_000)
    free = training(count, options.seed) if given is None else [one for one in given if one.schema is None]
    formed = (
        training_forms(max(8, count // 12), options.seed) if given is None else [one for one in given if one.schema]
    )
    begun, samples = time.monotonic(), list[Sample]()

    def part(name: str, asked: Sequence[Asked], share: float, size: int, tokens: int, prompts: bool = False) -> None:
        """In pieces, so that it can end in time."""
        until, before, place = time.monotonic() + share * seconds, sum(len(one.ids) for one in samples), 0
        while place < len(asked) and (place == 0 or time.monotonic() < until):
            samples.extend(
                answered(
                    model,
                    asked[place : place + size],
                    max_tokens=tokens,
                    seed=options.seed + place,
                    prompts=prompts,
                    engine=engine,
                )
            )
            place += size
        say(f"{name}: {min(place, len(asked)):,} prompts, {sum(len(one.ids) for one in samples) - before:,} tokens")

    tokens = 48 if options.small else 256
    size = SLOTS if not options.small else 16  # all begin together: a GPU goes on by itself while nobody's prompt waits
    part("in JSON", asked_of(model, formed), 0.12, size, tokens)
    if given is None and not options.small:
        own = invented(model, options.invent, max_tokens=96, seed=options.seed, engine=engine) if options.invent else []
        say(f"made up {len(own):,} prompts")
        part("its own prompts", own, 0.2, size, tokens, prompts=True)
    left = 1 - (time.monotonic() - begun) / seconds
    part("free", asked_of(model, free), max(left, 0.05), size, tokens)
    return samples


def planned(model: Model, text: Path, lessons: Lessons, options: argparse.Namespace, seconds: float) -> Lessons:
    """As many steps as the time allows, by what a few of them take."""
    place, folder = device_of(options.device), options.out / "probe"
    draft = draft_from(model.decoder, options.layers)
    probe = trainer_of(
        draft,
        teacher_of(model.decoder, lessons, place),
        text,
        folder,
        replace(lessons, steps=8),
        place,
        options.seed,
        model,
    )
    marks: list[float] = []
    probe.run([lambda step, point: marks.append(time.monotonic())])
    shutil.rmtree(folder, ignore_errors=True)
    each = (marks[-1] - marks[2]) / (len(marks) - 3)
    steps = max(20, int(TEACHING * seconds / each))
    say(f"a step of {lessons.rows * lessons.length:,} tokens takes {each:.3f} s: {steps:,} steps in {seconds:.0f} s")
    return replace(lessons, steps=steps if options.steps is None else options.steps)


def taught(model: Model, text: Path, lessons: Lessons, options: argparse.Namespace) -> Path:
    def told(step: int, point: Any) -> None:
        if step <= 3 or step % max(1, lessons.steps // 40) == 0 or step == lessons.steps:
            say(
                f"step {step:,} of {lessons.steps:,}: loss {point['loss']:.3f}, kl {point['kl']:.3f}, "
                f"agrees {point['correct']:.3f}, {point['tokens/s']:,.0f} tokens/s"
            )

    return distil(
        model,
        text,
        options.out,
        layers=options.layers,
        lessons=lessons,
        device=options.device,
        seed=options.seed,
        told=[told],
    )


def looked_at(model: Model, path: Path, options: argparse.Namespace) -> dict[str, float]:
    """A first look at prompts that it has not learnt from; bench/draft.py measures."""
    device = "cpu" if options.device == "cpu" else "auto"
    engine = Engine(model.runner, model.tokenizer, draft=load(path, device=device).runner)
    found = {}
    for name, prompts in (("free", held_out(8)), ("JSON", held_out_forms(8))):
        asked = asked_of(model, prompts)
        requests = [Request(one.ids, max_tokens=48, constraint=one.constraint, seed=1) for one in asked]
        before = dict(engine.facts().get("speculation", {}).get("draft", {"kept": 0, "drafts": 0}))
        guessed = [replace(one, speculation=Speculation(kind="draft", length=5)) for one in requests]
        answers = engine.answer(guessed)
        after = engine.facts()["speculation"]["draft"]
        drafts = after["drafts"] - before["drafts"]
        found[name] = (after["kept"] - before["kept"]) / max(drafts, 1)
        same = [one.ids for one in answers] == [
            one.ids for one in Engine(model.runner, model.tokenizer).answer(requests)
        ]
        words = "the same" if same else "not all the same (on a GPU last bits depend on the size of a call)"
        say(f"{name}: {found[name]:.2f} guesses kept in a call of 5, answers {words}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name, GGUF file or folder (default: smollm2)")
    parser.add_argument("--out", type=Path, required=True, help="where draft.gguf goes")
    parser.add_argument("--prompts", type=Path, help="a folder of prompts (default: made from the seed)")
    parser.add_argument("--minutes", type=float, help="for everything (default: 7.5; with --small 3)")
    parser.add_argument("--layers", type=int, help="layers of the draft (default: 7; with --small 2)")
    parser.add_argument("--steps", type=int, help="instead of as many as the time allows")
    parser.add_argument("--count", type=int, help="prompts at most")
    parser.add_argument("--invent", type=int, default=768, help="prompts that the model makes up (default: 768)")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--hard", type=float, default=0.3, help="the share of plain cross-entropy (default: 0.3)")
    parser.add_argument("--divergence", default="forward")
    parser.add_argument("--ends", action="store_true", help="train embedding and head too")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--keep-text", action="store_true", help="take the text of an earlier run in --out, if it is there"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.device = "cpu" if options.small and options.device == "cuda" else options.device
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: use --small, or --device cpu")
    options.layers = options.layers or (2 if options.small else 7)
    total = 60 * (options.minutes or (3 if options.small else 7.5))
    begun = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)

    model = load(options.model, device=options.device)
    say(f"{model.name} on {options.device}; {total:.0f} s for everything")
    text = options.out / TEXT
    if not (options.keep_text and text.is_file()):
        engine = Engine(model.runner, model.tokenizer, slots=16 if options.small else SLOTS)
        samples = write_text(model, engine, options, WRITING * total - (time.monotonic() - begun))
        write_samples(text, samples)
        say(f"{len(samples):,} samples, {sum(len(one.ids) for one in samples):,} tokens")
        del engine, samples
        gc.collect()  # an engine and its parts know each other
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    lessons = Lessons(
        rows=options.rows or (2 if options.small else 32),
        length=options.length or (128 if options.small else 1024),
        rate=options.rate,
        hard=options.hard,
        divergence=options.divergence,
        ends=options.ends,
        compile=options.compile,
        chunk=1024,
    )
    lessons = planned(model, text, lessons, options, total - (time.monotonic() - begun) - 0.05 * total)
    path = taught(model, text, lessons, options)
    size = path.stat().st_size
    say(f"{path}: {size / (1 << 20):.1f} MiB, {options.layers} layers")
    try:
        looked_at(model, path, options)
    except Exception as error:  # the file is there: nothing may take it away now
        say(f"the first look failed: {error!r}")
    say("done")
    return int(size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
