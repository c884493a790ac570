"""An adapter for a task that the default model fails, made on this machine, and what it still is after every hop.

The task is `bench/data/ledger.py`: messages about money become lines of one house format; 200 to learn from, 100 to test with.
Measured: how many lines the model writes exactly right before and after (before also with five examples in the prompt, as a
person would try first), and how long `adapt` takes with nothing but its defaults. Then the adapter leaves Orchard: its folder in
peft and transformers must give the same scores, and merged into a GGUF file it must give the same answers in llama.cpp: in
float32, where both compute the same numbers. With half precision and the engine, which round differently, it is counted how many
answers part and how sure the model was there.

Peers run in processes and environments of their own: `.venv-peers`, this one, or `--peers-python PATH`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench" / "data"))

from ledger import Example, examples  # noqa: E402

from orchard.bench.peers import environment  # noqa: E402
from orchard.core.report import Bound, Claim, Report, Value  # noqa: E402
from orchard.recipes.adapt import Adapted, adapt  # noqa: E402
from orchard.session.export import export  # noqa: E402
from orchard.session.model import Model, load  # noqa: E402

TARGET = ROOT / "results" / "bench" / "adapt.json"
MODEL = "smollm2"
MOST_TOKENS = 64
"""Of an answer; the longest right one has fewer."""
SHOWN = 5
SCORED = 8
"""Prompts with their answers, of which all scores are compared with peft's."""
CLAIMS = [
    Claim("base", "The model alone writes at most a fifth of the lines right", "base", Bound("<=", 0.2)),
    Claim("adapted", "With the adapter it writes at least four fifths right", "adapted", Bound(">=", 0.8), "base"),
    Claim(
        "time", "Making the adapter takes ten minutes at most, with all that adapt does", "seconds", Bound("<=", 600)
    ),
    Claim("peft", "In peft and transformers the adapter gives the same scores", "peft.difference", Bound("<=", 1e-3)),
    Claim(
        "merged",
        "Merged into a GGUF file and computed in float32 it gives the same answers in llama.cpp as here",
        "merged.f32.other",
        Bound("==", 0),
        "merged.f16.other",
    ),
]
PEFT = """
import json, sys; job = json.loads(sys.argv[1])
import peft, torch, transformers
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
model = peft.PeftModel.from_pretrained(model, job["adapter"]).eval()
with torch.inference_mode():
    for number, ids in enumerate(job["prompts"]):
        model(input_ids=torch.tensor([ids])).logits[0].numpy().tofile(f"{job['to']}-{number}")
print(json.dumps({"peft": peft.__version__, "transformers": transformers.__version__}))
"""
LLAMA = """
import json, sys; job = json.loads(sys.argv[1])
import llama_cpp
model = llama_cpp.Llama(job["path"], n_ctx=job["context"], verbose=False)
found = []
for ids in job["prompts"]:
    model.reset()
    model.eval(ids)
    said = []
    while len(said) < job["tokens"]:
        token = model.sample(temp=0.0)
        if token in job["ends"]:
            break
        said.append(token)
        model.eval([token])
    found.append(said)
print(json.dumps({"answers": found, "version": llama_cpp.__version__}))
"""


def prompts_of(tests: Sequence[Example], shown: Sequence[Example] = ()) -> list[list[dict[str, str]]]:
    """Conversations that end with the question; `shown` are answered before it."""
    before = [
        {"role": role, "content": text}
        for one in shown
        for role, text in (("user", one.prompt), ("assistant", one.answer))
    ]
    return [[*before, {"role": "user", "content": test.prompt}] for test in tests]


def right(model: Model, tests: Sequence[Example], shown: Sequence[Example] = ()) -> Value:
    """The share of lines that are right to the letter."""
    found = model.generate_many(prompts_of(tests, shown), max_tokens=MOST_TOKENS)
    count = sum(answer.text.strip() == test.answer for answer, test in zip(found, tests, strict=True))
    return Value(count / len(tests), note=f"{count} of {len(tests)}, the likeliest token each time")


def in_peft(pythons: Sequence[str], package: Path, tests: Sequence[Example], work: Path) -> dict[str, Value]:
    """The largest difference of any score between peft and Orchard, both in float32."""
    export(MODEL, work / "dense", format="hf", type="f32")
    ours = load(MODEL, dtype="float32", device="cpu")
    variant = ours.adapters.model(ours.adapters.load(package, name="packaged"))
    talks = [
        [*talk, {"role": "assistant", "content": test.answer}]
        for talk, test in zip(prompts_of(tests), tests, strict=True)
    ]
    ids = [ours.prompt_ids(talk) for talk in talks[:SCORED]]
    to = work / "scores"
    job = {"base": str(work / "dense"), "adapter": str(package), "prompts": ids, "to": str(to)}
    facts = _asked(pythons, ("peft", "transformers"), PEFT, job)
    apart, plain = [], []
    for number, one in enumerate(ids):
        theirs = np.fromfile(f"{to}-{number}", np.float32).reshape(len(one), -1)
        apart.append(np.abs(variant.logits(one)[0].numpy() - theirs).max())
        plain.append(np.abs(ours.logits(one)[0].numpy() - theirs).max())
    words = f"all scores of {sum(map(len, ids)):,} places; peft {facts['peft']}, transformers {facts['transformers']}"
    return {
        "peft.difference": Value(float(max(apart)), note=words),
        "peft.adapter": Value(float(max(plain)), note="what the adapter itself changes, for comparison"),
    }


def merged(
    pythons: Sequence[str], package: Path, tests: Sequence[Example], work: Path, kind: str, dtype: str
) -> dict[str, Value]:
    """Answers of the merged file that llama.cpp gives otherwise, how sure the model was where they part, and how many are right.
    `dtype`: what is computed in here; auto is the engine."""
    path = work / f"merged-{kind}.gguf"
    export(MODEL, path, format="gguf", type=kind, adapters=[package], merge=True)
    model = load(path, device="cpu", dtype=dtype)
    ids = [model.prompt_ids(talk) for talk in prompts_of(tests)]
    ours = model.generate_many(ids, max_tokens=MOST_TOKENS, logprobs=2)
    ends = sorted(model.tokenizer.eos_ids)
    job = {"path": str(path), "prompts": ids, "tokens": MOST_TOKENS, "ends": ends, "context": 512}
    found = _asked(pythons, ("llama_cpp",), LLAMA, job)
    path.unlink()
    apart = [_parting(one, said, ends) for one, said in zip(ours, found["answers"], strict=True)]
    sure = [margin for margin in apart if margin is not None]
    count = sum(answer.text.strip() == test.answer for answer, test in zip(ours, tests, strict=True))
    name = f"merged.{kind}"
    return {
        f"{name}.other": Value(len(sure), note=f"of {len(tests)}; llama-cpp-python {found['version']}, here {dtype}"),
        f"{name}.margin": Value(
            max(sure, default=0.0), unit="nats", note="the best word's lead where answers part, at most"
        ),
        f"{name}.right": Value(count / len(tests), note="of the merged file, here"),
    }


def _parting(answer: Any, said: Sequence[int], ends: Sequence[int]) -> float | None:
    """The lead of our word over the next best where two answers part; None where they are the same."""
    mine = [token for token in answer.ids if token not in ends]
    if mine == list(said):
        return None
    place = next((n for n, (one, other) in enumerate(zip(mine, said)) if one != other), min(len(mine), len(said)))
    if place >= len(answer.logprobs):
        return float("inf")
    best, second = sorted((score for _, score in answer.logprobs[place].top), reverse=True)[:2]
    return float(best - second)


def _asked(pythons: Sequence[str], packages: Sequence[str], program: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a program in the first environment that has all of these packages."""
    look = f"import importlib.util as u; raise SystemExit(not all(map(u.find_spec, {list(packages)!r})))"
    for python in pythons:
        if subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0:
            command = [python, "-c", program, json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment())
            if done.returncode:
                raise SystemExit(f"{' and '.join(packages)} failed: {done.stderr[-2000:]}")
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return answer
    raise SystemExit(f"no environment here has {' and '.join(packages)}; name one with --peers-python")


def train(training: Sequence[Example], tests: Sequence[Example], work: Path, settings: dict[str, Any]) -> Adapted:
    for name, rows in (("train", training), ("test", tests)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(one.row()) + "\n" for one in rows), encoding="utf-8")
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    return adapt(MODEL, work / "train.jsonl", work / "package", held_out=str(work / "test.jsonl"), say=say, **settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    parser.add_argument(
        "--peers-python", action="append", default=[], help="a Python that has peft or llama-cpp-python"
    )
    parser.add_argument("--small", action="store_true", help="a few steps and a few tests, to see that it runs")
    parser.add_argument("--package", type=Path, help="measure this one, and train none")
    parser.add_argument("--keep", type=Path, help="a folder for the package that was trained")
    options = parser.parse_args()
    begun = time.perf_counter()
    training, tests = examples()
    settings: dict[str, Any] = {}
    if options.small:
        training, tests, settings = training[:16], tests[:8], {"steps": 2}
    here = [str(path) for path in (ROOT / ".venv-peers" / "bin" / "python",) if path.is_file()]
    pythons = [*options.peers_python, *here, sys.executable]
    values: dict[str, Value | float] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        package = work / "package"
        if options.package is not None:
            shutil.copytree(options.package, package)
        else:
            made = train(training, tests, work, settings)
            if options.keep is not None:
                shutil.copytree(package, options.keep)
            values["seconds"] = Value(
                round(made.seconds, 1), unit="s", note="all of adapt: reading, training, measuring"
            )
            values["steps"] = Value(made.report.values["steps"].value)
            values["training"] = Value(made.report.wall_time, unit="s", note="the steps alone")
        model = load(MODEL)
        values["base"] = right(model, tests)
        values["base, examples shown"] = right(model, tests, training[:SHOWN])
        values["adapted"] = right(model.adapters.model(model.adapters.load(package, name="packaged")), tests)
        values |= in_peft(pythons, package, tests, work)
        values |= merged(pythons, package, tests, work, "f32", "float32")
        values |= merged(pythons, package, tests, work, "f16", "auto")
    took = round(time.perf_counter() - begun, 1)
    report = Report.record("bench", "adapt", values=values, claims=CLAIMS, seed=0, wall_time=took)
    report.save(options.out)
    Console().print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
