"""The loop: the same run is the same bits, whatever interrupts it; what goes wrong is said and harms nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.errors import ConfigError
from orchard.data import Repeat
from orchard.nn.linear import Linear
from orchard.text.tokenizer import Tokenizer
from orchard.train.errors import Diverged, NothingToLearn
from orchard.train.trainer import Saving, Trainer
from tests.generate.conftest import make_tokenizer
from tests.train.training import run_config, weights


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def made(folder: Path, tokenizer: Tokenizer, name: str = "run", **changes: Any) -> Trainer:
    trainer: Trainer = run_config(folder, tokenizer, **changes).build(folder=folder / name, tokenizer=tokenizer)
    return trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_learns_and_the_same_run_is_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, second = (made(tmp_path, tokenizer, name, steps=40) for name in ("a", "b"))
    report, again = first.run(), second.run()
    losses = report.series["loss"]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert losses == again.series["loss"] and same(weights(first), weights(second))
    assert report.values["tokens"].value > 0 and report.config is not None
    other = made(tmp_path, tokenizer, "c", steps=40, seed=1)
    assert other.run().series["loss"] != losses


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = made(tmp_path, tokenizer, "whole")
    wanted = whole.run()

    def stop(number: int, point: Any) -> None:
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, tokenizer, "parts").run(told=[stop])
    rest = made(tmp_path, tokenizer, "parts")
    found = rest.run()
    assert rest.done == 12 and same(weights(rest), weights(whole))
    assert found.series["loss"] == wanted.series["loss"]
    assert rest.ema is not None and whole.ema is not None
    assert same(rest.ema.averages, whole.ema.averages)
    assert made(tmp_path, tokenizer, "parts").run().series["loss"] == wanted.series["loss"], "nothing is left to do"


def test_killed_at_any_moment_and_resumed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}

    def start(folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.train.training", str(folder), "30"]
        return subprocess.Popen(command, env=environment)

    whole = start(tmp_path / "whole")
    assert whole.wait(120) == 0
    dice, killed = random.Random(5), 0
    folder = tmp_path / "killed"
    for _ in range(40):
        process = start(folder)
        run = folder / "run"
        begun = time.monotonic()
        while process.poll() is None and not (run.is_dir() and any(run.iterdir())) and time.monotonic() - begun < 60:
            time.sleep(0.01)
        try:
            process.wait(dice.uniform(0, 0.6) if killed < 1 else 120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
            continue
        assert process.returncode == 0
        break
    assert killed >= 1 and (folder / "weights.json").exists()
    files = [json.loads((path / "weights.json").read_text()) for path in (tmp_path / "whole", folder)]
    assert files[0] == files[1]


def test_micro_batches_are_only_a_matter_of_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    losses = [made(tmp_path, tokenizer, f"m{micro}", micro=micro).run().series["loss"] for micro in (None, 3, 1)]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=2e-5)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_what_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trainer = made(tmp_path, tokenizer, save=Saving.Config(every=2))

    def break_it(number: int, point: Any) -> None:
        if number == 5:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(float("nan"))

    with pytest.raises(Diverged, match=r"step 6.*rows.*targets") as said:
        trainer.run(told=[break_it])
    assert "after step 4" in said.value.hint
    again = made(tmp_path, tokenizer, save=Saving.Config(every=2))
    assert again.resume() and again.done == 4
    assert all(torch.isfinite(value).all() for value in weights(again).values())


def test_a_row_that_breaks_the_loss_is_named_by_file_and_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1};"} for n in range(60)]
    rows[32]["completion"] = "@;"
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = run_config(tmp_path, tokenizer).set("model.head", Linear.Config()).model
    trainer = made(tmp_path, tokenizer, model=model, steps=30)
    with torch.no_grad():
        trainer.model.embedding.weight[tokenizer.encode("@")[-1]] = float("inf")  # type: ignore[union-attr, operator]
    with pytest.raises(Diverged, match=r"row \d \(.*sums.jsonl:"):
        trainer.run()


def test_what_cannot_be_run_is_said_before_or_in_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    short = run_config(tmp_path, tokenizer, steps=100).rewrite(Repeat, lambda cfg: cfg.clone(epochs=1))
    with pytest.raises(NothingToLearn, match="of 100 steps"):
        short.build(folder=tmp_path / "short", tokenizer=tokenizer).run()
    for wrong in ({"steps": 0}, {"dtype": "float8"}, {"micro": 0}, {"model": None}):
        with pytest.raises(ConfigError):
            made(tmp_path, tokenizer, "wrong", **wrong)
    made(tmp_path, tokenizer, "other").run()
    with pytest.raises(ConfigError):
        made(tmp_path, tokenizer, "other", seed=9).run()


def test_held_out_loss_is_measured_and_changes_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = made(tmp_path, tokenizer, "plain")
    plain.run()
    source = run_config(tmp_path, tokenizer).source
    watched = made(tmp_path, tokenizer, "watched", held_out={"same": source}, held_out_every=6, held_out_batches=2)
    report = watched.run()
    assert same(weights(plain), weights(watched))
    points = report.series["held out, same"]
    assert [step for step, _ in points] == [6, 12] and points[1][1] < points[0][1]
    assert report.values["loss, held out, same"].value == points[1][1]
