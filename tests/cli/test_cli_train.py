"""`orchard train`: lists and shows, trains and goes on, and says what is wrong with a command line before anything is done."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchard
from orchard.cli.main import main
from orchard.cli.train_words import split_list
from tests.recipes.small import talks, texts
from tests.tiny import tiny_gguf

THIN = ("--set", "train.model.stack.layers[*].mlp.hidden_dim=32")
SHORT = ("steps=3", "rows=2", "length=64")


def train(*words: Any) -> int:
    return main(["train", *map(str, words)])


@pytest.fixture
def told(capsys: Any) -> Any:
    """Exit code, stdout and stderr of a command line."""

    def run(*words: Any) -> tuple[int, str, str]:
        code = train(*words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("base") / "tiny.gguf")


def test_it_lists_what_there_is(told: Any) -> None:
    code, out, _ = told("--list")
    assert code == 0 and "  pretrain " in out and "\n--with\n" in out and "  rslora " in out
    code, out, _ = told("--list", "--json")
    assert set(json.loads(out)) == {"recipes", "with"}
    code, out, _ = told("lora", "--list")
    assert code == 0 and out.startswith("Fine-tune an adapter") and "\nr " in out and "required" in out
    facts = json.loads(told("lora", "--list", "--json")[1])
    assert {
        "name": "r",
        "type": "int",
        "required": False,
        "about": "the rank of the side paths",
        "default": 32,
    } in facts["arguments"]


def test_it_shows_a_config_and_does_nothing(told: Any, tmp_path: Path) -> None:
    words = (
        "sft",
        "rows.jsonl",
        "lr=1e-4",
        "--with",
        'lora:r=8,targets=["q","v"]',
        "--set",
        "train.steps=7",
        "--seed",
        5,
    )
    code, out, _ = told(*words, "--on-bad", "skip", "--device", "cpu", "--out", tmp_path / "run", "--show", "--json")
    assert code == 0 and not (tmp_path / "run").exists()
    cfg = orchard.core.config.Config.from_dict(json.loads(out))
    assert cfg.train.steps == 7 and cfg.train.optim.lr == 1e-4 and cfg.train.seed == 5 and cfg.device == "cpu"
    assert cfg.adapter.r == 8 and cfg.adapter.targets == ["q", "v"]
    assert cfg.train.source.get("source.source.source.on_bad") == "skip"
    assert cfg.train.source.get("source.source.source.source.source.seed") == 5
    assert told(*words, "--show")[1].startswith("Run\n  train: Trainer\n")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((), "which recipe?", "--list"),
        (("pretrian", "x.txt"), "no recipe is called 'pretrian'", "did you mean pretrain?"),
        (("pretrain",), "pretrain needs data", "orchard train pretrain PATH"),
        (("pretrain", "nowhere"), "nowhere is no file or folder", ".jsonl"),
        (("sft", "missing.jsonl"), "no files at missing.jsonl", ".jsonl"),
        (("pretrain", "x.txt", "setps=3"), "takes no 'setps'", "did you mean steps"),
        (("pretrain", "x.txt", "steps=3.5"), "steps is '3.5'", "it has to be a whole number"),
        (("pretrain", "x.txt", "steps=3", "steps=4"), "steps is given twice", ""),
        (("pretrain", "x.txt", "data=y.txt"), "data is named twice", ""),
        (("pretrain", "x.txt", "size=7b"), "no size is called '7b'", "1b"),
        (("pretrain", "x.txt", "optim=sgd"), "no optimiser is called 'sgd'", "adamw"),
        (("pretrain", "x.txt", "tokenizer=nobody"), "no model called 'nobody'", ""),
        (("pretrain", "x.txt", "dtype=int8"), "dtype is 'int8'", "bfloat16"),
        (("pretrain", "x.txt", "--set", "train.optm.lr=1"), "Run has no 'train.optm.lr'", "train.optim.lr"),
        (("pretrain", "x.txt", "--set", "train.optim.lr=fast"), "train.optim.lr is 'fast'", "a number"),
        (("pretrain", "x.txt", "--with", "loar"), "is called 'loar'", "lora"),
        (("sft", "x.jsonl", "--with", "lora:rank=8"), "--with lora takes no 'rank'", "r"),
        (("sft", "x.jsonl", "--with", "lora:8"), "'8' is no setting of --with lora", "it takes: r, alpha"),
        (("sft", "x.jsonl", "--with", "lora:r=x"), "r is 'x'", "a whole number"),
        (("pretrain", "x.txt", "--with", "lora"), "an adapter needs a base", "base=MODEL"),
        (("pretrain", "x.txt", "--device", "abacus"), "no device 'abacus'", ""),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_left(
    words: tuple[str, ...], message: str, hint: str, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = told(*words)
    assert (code, out) == (2, "")
    error, hinted = err.splitlines()
    assert message in error and hint in hinted and not list(tmp_path.iterdir())


def test_lists_are_cut_at_their_own_commas() -> None:
    assert split_list('r=8,targets=["q","v,w"],x={"a":1,"b":[2,3]}') == [
        "r=8",
        'targets=["q","v,w"]',
        'x={"a":1,"b":[2,3]}',
    ]
    assert split_list("") == []


def test_train_go_on_and_refuse(told: Any, tmp_path: Path) -> None:
    words = ("pretrain", texts(tmp_path), "size=1m", "split=blank", *SHORT, *THIN, "--out", tmp_path / "run")
    code, out, err = told(*words, "--json")
    report = json.loads(out)
    assert code == 0 and report["kind"] == "train" and len(report["series"]["loss"]) == 3
    model = orchard.load(tmp_path / "run" / "model")
    assert model.generate("The", max_tokens=2).usage.output == 2
    code, out, _ = told(*words)
    assert code == 0 and "loss" in out and "the model is in" in out, "a run that is done says so again"
    code, _, err = told(*words, "--set", "train.steps=4")
    assert code == 2 and "train.steps: 3 → 4" in err and "--force-new" in err
    code, _, err = told(*words, "--set", "train.steps=4", "--force-new")
    assert code == 0 and (tmp_path / "run.before-1" / "model").is_dir() and "run.before-1 now" in err


def test_a_folder_with_something_else_in_it_is_left_alone(told: Any, tmp_path: Path) -> None:
    data = texts(tmp_path)
    code, _, err = told("pretrain", data, "--out", tmp_path)
    assert code == 2 and "is not empty" in err
    code, _, err = told("pretrain", data, "--out", data)
    assert code == 2 and "is a file" in err


def test_bad_rows(told: Any, tmp_path: Path, base: Path) -> None:
    data = Path(talks(tmp_path, count=10))
    data.write_text(data.read_text() + "not json\n")
    words = ("lora", data, f"base={base}", "r=2", "steps=8", "rows=2", "length=64")
    code, _, err = told(*words, "--out", tmp_path / "a")
    assert code == 1 and "talks.jsonl:11" in err
    code, out, _ = told(*words, "--out", tmp_path / "b", "--on-bad", "skip", "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and any("rows were left out" in note and "talks.jsonl:11" in note for note in notes)


# Processes --------------------------------------------------------------------------------------------------------------


def interrupted(tmp_path: Path, processes: int, act: Callable[[], None]) -> int:
    """The exit code of a long run to which something happens after its first checkpoint."""
    words = ["pretrain", texts(tmp_path), "size=1m", "split=blank", "steps=100000", "rows=2", "length=32", *THIN]
    words += ["--set", "train.save.every=1", "--out", str(tmp_path / "run"), "--processes", str(processes)]

    def wait() -> None:
        while not list(tmp_path.glob("run/step-*")):
            if ended.wait(0.05):
                return
        act()

    ended = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        return train(*words)
    finally:
        ended.set()
        thread.join()


@pytest.mark.loopback
@pytest.mark.parametrize("processes", [2])
def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_go_on(processes: int, tmp_path: Path, capfd: Any) -> None:
    assert interrupted(tmp_path, processes, lambda: os.kill(os.getpid(), signal.SIGINT)) == 130
    out, err = capfd.readouterr()
    assert out == "" and "the same command goes on from there" in err and "Traceback" not in err
    assert list(tmp_path.glob("run/step-*")) and not (tmp_path / "run" / "model").exists()


@pytest.mark.loopback
def test_a_worker_that_dies_ends_the_run(tmp_path: Path, capfd: Any) -> None:
    assert interrupted(tmp_path, 2, lambda: os.kill(_worker(rank="1"), signal.SIGKILL)) == 1
    err = capfd.readouterr().err
    assert "rank 1" in err and "goes on from its last checkpoint" in err and "Traceback" not in err


@pytest.mark.long
@pytest.mark.loopback
@pytest.mark.parametrize("recipe", ["pretrain", "lora"])
def test_two_processes_learn_what_one_does(recipe: str, tmp_path: Path, base: Path, capfd: Any) -> None:
    words: tuple[Any, ...] = (*THIN, "size=1m", "split=blank", "lr=1e-2", texts(tmp_path))
    if recipe == "lora":
        words = (f"base={base}", "r=4", "lr=1e-3", talks(tmp_path))
    words = (recipe, *words, "steps=20", "rows=4", "length=64", "--json")
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        assert train(*words, "--out", folder, "--processes", processes) == 0
        losses.append(json.loads(capfd.readouterr().out)["series"]["loss"])
        assert (folder / ("model" if recipe == "pretrain" else "adapter")).is_dir()
    one, two = losses
    assert len(one) == len(two) == 20 and one[-1] < 0.95 * one[0]
    assert max(abs(a - b) for a, b in zip(one, two)) < 1e-4


def _worker(rank: str) -> int:
    """The process of a rank, among our children."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no process of rank {rank} among {children}")
