"""Runs that are killed at random moments and started again end with the same bits as runs that were left alone.

A decoder of some 400,000 parameters with side paths that use dropout learns 200 steps of this repository's own documentation
(shuffled, packed, prefetched by a thread), in two micro-batches a step, with averages of its weights: in float32 and bfloat16,
with AdamW and Muon. Each case is run once as it is, once with five SIGKILLs and once with signals that ask for an end (Ctrl-C
and SIGTERM by turns). Moments are drawn from a seed, over everything a program does after its imports; every second kill waits
until a checkpoint is being written. Then two processes that share a run lose one of them, first the second, then the first: the
other one must say so and end, and both started again must go on.

Compared are SHA-256 sums of the weights, of their averages, of everything the optimiser keeps, and of all losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchard.core.progress import progress  # noqa: E402
from orchard.core.report import Bound, Claim, Report, Value  # noqa: E402

TARGET = ROOT / "results" / "bench" / "resume.json"
CASES = {f"{optim} {dtype}": (optim, dtype) for dtype in ("float32", "bfloat16") for optim in ("adamw", "muon")}
EVERY = 5
"""Steps between two checkpoints: a kill costs at most as many."""
LOST = 3
"""What a process returns that lost another one."""
CLAIMS = [
    Claim(
        "killed", "Killed runs that end with other weights, averages, states or losses", "killed: other", Bound("==", 0)
    ),
    Claim("asked", "The same of runs that were asked to end", "asked: other", Bound("==", 0)),
    Claim("kills", "Every run was killed as often as planned", "kills missing", Bound("==", 0)),
    Claim("saves", "Kills while a checkpoint was being written", "kills during a save", Bound(">=", 1)),
    Claim(
        "lost",
        "A process whose partner was killed ends with WorkerLost",
        "partners that did not say so",
        Bound("==", 0),
    ),
    Claim("after", "Checkpoints that cannot be gone on from after that", "lost: no way on", Bound("==", 0)),
    Claim("two", "Two processes that were killed end with other weights or losses", "lost: other", Bound("==", 0)),
]


# The program that is killed -----------------------------------------------------------------------------------------------


def work(folder: Path, data: Path, case: str, steps: int) -> int:
    """One process of a run. Says each step; leaves `end.json` if it comes to the end."""
    import torch

    from orchard.train.world import WorkerLost, world
    from tests.generate.conftest import make_tokenizer

    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    print("begun", flush=True)
    try:
        with world(device="cpu", timeout=60) as here:
            trainer = settings(data, tokenizer.vocab_size, case, steps).build(
                folder=folder / "run", tokenizer=tokenizer, here=here
            )
            report = trainer.run(told=[lambda number, point: print(number, flush=True)])
            if here.first:
                (folder / "end.json").write_text(json.dumps(sums(trainer, report)))
    except WorkerLost as error:
        print(f"lost {list(error.ranks)}: {error}", flush=True)
        return LOST
    return 0


def settings(data: Path, vocab: int, case: str, steps: int) -> Any:
    from orchard.data import Batches, Encode, Pack, Prefetch, Repeat, Shuffle, Text
    from orchard.models.language import Decoder
    from orchard.nn.attention import Attention
    from orchard.nn.mlp import GatedMLP
    from orchard.nn.stack import Block, Stack
    from orchard.train.ema import EMA
    from orchard.train.optim import AdamW, Muon
    from orchard.train.trainer import Saving, Trainer
    from orchard.transforms.lora import Lora

    optim, dtype = CASES[case]
    block = Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=24), mlp=GatedMLP.Config(hidden_dim=288))
    stack = Stack.Config(layers=[block.clone() for _ in range(3)])
    model = Lora(r=4, alpha=8.0, dropout=0.1)(Decoder.Config(vocab=vocab, dim=96, context=64, stack=stack, head=None))
    rows = Shuffle.Config(source=Text.Config(paths=str(data), split="blank", order="shuffled"), buffer=64, seed=1)
    samples = Pack.Config(source=Encode.Config(source=Repeat.Config(source=rows)), length=64, mode="cut")
    return Trainer.Config(
        model=model,
        source=Prefetch.Config(source=Batches.Config(source=samples, rows=8)),
        steps=steps,
        micro=4,
        optim=(AdamW if optim == "adamw" else Muon).Config(lr=3e-3),
        ema=EMA.Config(),
        dtype=dtype,
        save=Saving.Config(every=EVERY),
    )


def sums(trainer: Any, report: Any) -> dict[str, str]:
    """SHA-256 of everything that must be the same; states of the optimiser by process."""
    place = trainer.checkpoints.place()
    files = json.loads((place / "manifest.json").read_text())["files"]
    losses = " ".join(float(loss).hex() for loss in report.series["loss"])
    return {
        "weights": _sum(trainer.checkpoints.weights().read_bytes()),
        "averages": _sum(trainer.checkpoints.weights(average=True).read_bytes()),
        "losses": _sum(losses.encode()),
        **{name: about["sha256"] for name, about in sorted(files.items()) if name.startswith("state")},
        "parameters": str(sum(parameter.numel() for parameter in trainer.model.parameters())),
    }


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Starting and killing it --------------------------------------------------------------------------------------------------


class Process:
    """A running worker; a thread reads which step it is at."""

    def __init__(self, folder: Path, data: Path, case: str, steps: int, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "run"
        self.step, self.begun, self.said = 0, 0.0, ""
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder), str(data), case, str(steps)]
        with (folder / f"errors{environment.get('RANK', '')}.txt").open("a") as errors:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.step = int(line)
            elif line.strip() == "begun":
                self.begun = time.monotonic()
            else:
                self.said += line

    def saving(self) -> bool:
        return any(self.run.glob(".step-*.part"))

    def over(self) -> bool:
        return self.process.poll() is not None

    def until(self, delay: float, step: int, save: bool) -> None:
        """So long after it began, and not past the given step; then, if asked, until something is being saved."""
        last = step + EVERY + 1 if save else step
        while not self.over() and self.step < last:
            late = self.step >= step or (self.begun and time.monotonic() - self.begun >= delay)
            if late and (not save or self.saving()):
                return
            time.sleep(0.0005)

    def end(self, number: signal.Signals | None = None, wait: float = 600) -> int:
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(wait)
        finally:
            self.process.kill()
            self._reader.join()


@dataclass
class Story:
    """What happened to one run: for each blow its signal, the step, and whether a checkpoint was half written."""

    blows: list[tuple[str, int, bool]] = field(default_factory=list)
    sums: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: list[str] = field(default_factory=list)


class Bench:
    def __init__(self, folder: Path, steps: int, kills: int, seed: int) -> None:
        self.folder, self.steps, self.kills = folder, steps, kills
        self.dice = random.Random(seed)
        self.data = folder / "data"
        self.data.mkdir()
        for path in sorted((ROOT / "docs").glob("*.md")):  # copies: the run must not depend on who edits them meanwhile
            shutil.copy(path, self.data / path.name)

    def left_alone(self, name: str, case: str) -> Story:
        process = Process(self.folder / name, self.data, case, self.steps)
        code = process.end()
        story = self._ended(name, code)
        story.seconds = time.monotonic() - process.begun
        return story

    def struck(self, name: str, case: str, seconds: float, signals: list[signal.Signals]) -> Story:
        """`seconds`: what the run takes when it is left alone."""
        folder, story = self.folder / name, Story()
        for number in range(self.kills):
            process = Process(folder, self.data, case, self.steps)
            delay = self.dice.uniform(0, 2 * seconds / (self.kills + 1))
            process.until(delay, self.steps * (number + 1) // (self.kills + 1), save=number % 2 == 1)
            which = signals[number % len(signals)]
            if process.over():
                story.trouble.append(f"{name} was over before kill {number + 1}")
            code = process.end(which)
            half = process.saving()
            story.blows.append((which.name, process.step, half))
            if which == signal.SIGKILL and code != -signal.SIGKILL:
                story.trouble.append(f"{name} returned {code} when it was killed")
        last = self._ended(name, Process(folder, self.data, case, self.steps).end())
        story.sums, story.trouble = last.sums, story.trouble + last.trouble
        return story

    def _ended(self, name: str, code: int) -> Story:
        end = self.folder / name / "end.json"
        if code or not end.exists():
            errors = (self.folder / name / "errors.txt").read_text()[-600:]
            return Story(trouble=[f"{name} did not end well ({code}): {errors}"])
        return Story(sums=json.loads(end.read_text()))

    # Two processes ------------------------------------------------------------------------------------------------------

    def pair(self, folder: Path, case: str) -> list[Process]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [
            Process(folder, self.data, case, self.steps, **place, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(2)
        ]

    def lost(self, case: str) -> tuple[Story, Story, list[int]]:
        """Left alone, and with a process killed twice; what the survivors returned."""
        whole, story, codes = Story(), Story(), []
        both = self.pair(self.folder / "two", case)
        if [process.end() for process in both] == [0, 0]:
            whole.sums = json.loads((self.folder / "two" / "end.json").read_text())
        seconds = time.monotonic() - both[0].begun
        folder = self.folder / "two-lost"
        for number, rank in enumerate((1, 0)):
            both = self.pair(folder, case)
            delay = self.dice.uniform(seconds / 6, seconds / 2)
            both[0].until(delay, self.steps * (number + 1) // 3, save=bool(number))
            both[rank].end(signal.SIGKILL)
            story.blows.append(("SIGKILL", both[0].step, both[0].saving()))
            codes.append(both[1 - rank].end(wait=120))
            if codes[-1] != LOST or f"lost [{rank}]" not in both[1 - rank].said:
                errors = (folder / f"errors{1 - rank}.txt").read_text()[-600:]
                story.trouble.append(f"rank {1 - rank} returned {codes[-1]}: {both[1 - rank].said} {errors}")
        both = self.pair(folder, case)
        ended = [process.end() for process in both]
        if ended == [0, 0]:
            story.sums = json.loads((folder / "end.json").read_text())
        else:
            story.trouble.append(f"after the losses the run ended with {ended}")
        return whole, story, codes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5, help="of each run (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only these")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        folder, data, case, steps = options.worker
        return work(Path(folder), Path(data), case, int(steps))
    cases, begun = options.case or list(CASES), time.perf_counter()
    stories: dict[str, dict[str, Story]] = {"whole": {}, "killed": {}, "asked": {}}
    with tempfile.TemporaryDirectory() as folder, progress("killing", total=3 * len(cases) + 1) as advance:
        bench = Bench(Path(folder), options.steps, options.kills, options.seed)
        for case in cases:
            whole = stories["whole"][case] = bench.left_alone(f"{case} whole", case)
            advance(note=case)
            for kind, signals in (("killed", [signal.SIGKILL]), ("asked", [signal.SIGINT, signal.SIGTERM])):
                stories[kind][case] = bench.struck(f"{case} {kind}", case, whole.seconds, signals)
                advance(note=case)
        two = bench.lost(cases[0])
        advance()
    report = told(stories, two, options, round(time.perf_counter() - begun, 1))
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


def told(
    stories: dict[str, dict[str, Story]], two: tuple[Story, Story, list[int]], options: Any, took: float
) -> Report:
    import torch  # noqa: F401  (so that the Report knows its version: the bits depend on it)

    whole, killed, asked = stories["whole"], stories["killed"], stories["asked"]

    def other(some: dict[str, Story]) -> int:
        return sum(not story.sums or story.sums != whole[case].sums for case, story in some.items())

    blows = [blow for story in killed.values() for blow in story.blows]
    everyone = [*whole.values(), *killed.values(), *asked.values(), *two[:2]]
    trouble = [text for story in everyone for text in story.trouble]
    early = sum("was over before" in text for story in killed.values() for text in story.trouble)
    values: dict[str, Value | int | float | str] = {
        "cases": Value(len(whole), note=", ".join(whole)),
        "steps": options.steps,
        "parameters": int(next(iter(whole.values())).sums.get("parameters", 0)),
        "kills": len(blows),
        "kills missing": options.kills * len(killed) - len(blows) + early,
        "kills during a save": Value(
            sum(half for _, _, half in blows), note=f"of {len(blows)}: left half a checkpoint"
        ),
        "killed: other": Value(other(killed), note=f"of {len(killed)} runs, {options.kills} kills each"),
        "asked: other": Value(other(asked), note=f"of {len(asked)} runs, {options.kills} times SIGINT or SIGTERM"),
        "partners that did not say so": Value(sum(code != LOST for code in two[2]), note=f"of {len(two[2])}"),
        "lost: no way on": int(not two[1].sums),
        "lost: other": Value(int(not two[1].sums or two[0].sums != two[1].sums), note="two gloo processes, one killed"),
        **{f"weights, {case}": story.sums.get("weights", "none") for case, story in whole.items()},
    }
    series: dict[str, list[Any]] = {
        f"{kind}, {case}": [list(blow) for blow in story.blows]
        for kind in ("killed", "asked")
        for case, story in stories[kind].items()
    }
    series["two processes"] = [list(blow) for blow in two[1].blows]
    note = "each blow: its signal, the last step that was told, whether it left a half-written checkpoint"
    return Report.record(
        "bench",
        "resume",
        values=values,
        claims=CLAIMS,
        seed=options.seed,
        series=series,
        notes=[note, *trouble[:20]],
        wall_time=took,
        config={"every": EVERY, "kills": options.kills, "steps": options.steps},
    )


if __name__ == "__main__":
    sys.exit(main())
