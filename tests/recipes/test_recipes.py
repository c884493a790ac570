"""Recipes: found by being there, described by themselves, whole configs that do not change unseen, and each of them trains."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import orchard
from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.recipes import Run, UnknownRecipe, get, names, recipe
from orchard.recipes.files import kind_of, leave_out_bad, rows_of
from orchard.recipes.shapes import SIZES, llama, words_of
from orchard.train.optim import Muon
from tests.golden.recipes import FOLDER, dump
from tests.recipes.small import SMALL, fresh, preferences, talks, texts, thin
from tests.tiny import tiny_gguf

OURS = ("distill", "dpo", "lora", "pretrain", "sft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("base") / "tiny.gguf"))


def test_they_are_found_and_unknown_ones_are_offered_others() -> None:
    assert set(OURS) <= set(names())
    with pytest.raises(UnknownRecipe, match="'pretrian'") as caught:
        get("pretrian")
    assert "pretrain" in caught.value.hint and caught.value.exit_code == 2
    with pytest.raises(UnknownRecipe) as caught:
        get("zzzz")
    assert "there are: " in caught.value.hint


def test_two_recipes_cannot_share_a_name() -> None:
    def sft(data: str) -> Run.Config:
        raise NotImplementedError

    with pytest.raises(ValueError, match="two recipes are called sft"):
        recipe(sft)


@pytest.mark.parametrize("name", OURS)
def test_they_say_what_they_take(name: str) -> None:
    function = get(name)
    doc = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert f"\n{argument}: " in doc, f"{name} does not say what {argument} is"


def test_no_recipe_changes_unseen() -> None:
    """Where this fails because a recipe was meant to change: `python -m tests.golden.recipes`, and look at the difference."""
    assert sorted(file.stem for file in FOLDER.glob("*.txt")) == names()
    for name in names():
        assert (FOLDER / f"{name}.txt").read_text() == dump(name), name


@pytest.mark.parametrize("name", OURS)
def test_configs_survive_being_stored(name: str) -> None:
    cfg = get(name)(data="texts.txt" if name == "pretrain" else "rows.jsonl")
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg


def trained(cfg: Run.Config, folder: Path) -> Any:
    return cfg.build(folder=folder).start()


def test_pretrain(tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text("The number 7 comes before 8.")
    cfg = fresh(tmp_path, steps=20, held_out=str(held), optim="muon")
    assert isinstance(cfg.train.optim, Muon.Config)
    report = trained(cfg, tmp_path / "run")
    assert report.series["loss"][-1] < 0.7 * report.series["loss"][0]
    assert report.series["held out, held"][-1][0] == 20
    model = orchard.load(tmp_path / "run" / "model")
    answer = model.generate("The number", max_tokens=5)
    assert answer.usage.output == 5 and model.tokenizer.vocab_size == 258


def test_sft(tmp_path: Path, base: str) -> None:
    report = trained(get("sft")(talks(tmp_path), base, lr=1e-2, **SMALL), tmp_path / "run")
    assert report.series["loss"][-1] < report.series["loss"][0]
    model = orchard.load(tmp_path / "run" / "model")
    assert model.generate("3", max_tokens=4).usage.output <= 4 and model.tokenizer.chat_template


@pytest.mark.parametrize("method", ["lora", "dora", "rslora"])
def test_lora(tmp_path: Path, base: str, method: str) -> None:
    cfg = get("lora")(talks(tmp_path), base, method=method, r=4, alpha=8, lr=1e-2, **SMALL)
    report = trained(cfg, tmp_path / "run")
    assert report.series["loss"][-1] < report.series["loss"][0]
    model = orchard.load(base)
    name = model.adapters.load(tmp_path / "run" / "adapter")
    assert model.adapters[name].config["use_rslora"] is (method == "rslora") and not model.adapters[name].notes
    assert model.adapters.model(name).generate("3", max_tokens=4).usage.output <= 4


def test_distill(tmp_path: Path, base: str) -> None:
    cfg = thin(get("distill")(talks(tmp_path), base, size="1m", lr=1e-2, **SMALL))
    report = trained(cfg, tmp_path / "run")
    assert report.series["kl"][-1] < report.series["kl"][0]
    assert orchard.load(tmp_path / "run" / "model").config.vocab == 260
    onward = get("distill")(talks(tmp_path), base, base=str(tmp_path / "run" / "model"), **SMALL)
    assert trained(onward, tmp_path / "onward").series["kl"][0] < report.series["kl"][0]


@pytest.mark.parametrize("rank", [4, None])
def test_dpo(tmp_path: Path, base: str, rank: int | None) -> None:
    cfg = get("dpo")(preferences(tmp_path), base, r=rank, lr=1e-2, **SMALL)
    report = trained(cfg, tmp_path / "run")
    assert report.series["loss"][0] == pytest.approx(0.6931, abs=1e-4), "the reference is the model itself at first"
    assert report.series["margin"][-1] > 0
    assert (tmp_path / "run" / ("model" if rank is None else "adapter")).is_dir()
    assert not get("dpo")("rows.jsonl", loss="simpo").reference


# Files and shapes -------------------------------------------------------------------------------------------------------


def test_files_say_what_they_are(tmp_path: Path) -> None:
    for name in ("a.txt", "deep/b.md"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    assert kind_of(str(tmp_path / "texts")) == "text" and kind_of("**/*.jsonl") == kind_of("x.ndjson.gz") == "jsonl"
    assert kind_of("x.parquet") == "parquet"
    (tmp_path / "texts" / "c.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="several kinds: jsonl, text"):
        kind_of(str(tmp_path / "texts"))
    with pytest.raises(UsageError, match="no file or folder"):
        kind_of("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \.jsonl"):
        kind_of(str(tmp_path / "empty"))
    with pytest.raises(UsageError, match=r"a\.txt holds text and b\.jsonl holds jsonl"):
        rows_of(["a.txt", "b.jsonl"], seed=0)
    with pytest.raises(UsageError, match="nothing to learn from"):
        rows_of([], seed=0)


def test_bad_rows_stop_or_are_left_out_and_counted(tmp_path: Path, base: str) -> None:
    data = Path(talks(tmp_path, count=10))
    data.write_text(data.read_text() + '{"prompt": 3}\nnot json\n')
    cfg = get("lora")(str(data), base, r=2, **SMALL | {"steps": 8})
    with pytest.raises(orchard.OrchardError, match=r"talks\.jsonl:1[12]"):
        trained(cfg, tmp_path / "stopped")
    leave_out_bad(cfg.train.source, "skip")
    notes = "\n".join(trained(cfg, tmp_path / "run").notes)
    assert "rows were left out" in notes and "talks.jsonl:1" in notes


@pytest.mark.parametrize("size", SIZES)
def test_every_size_can_be_written_for_others(size: str) -> None:
    tree = llama(size, 256, vocab=1000)
    family, words = words_of(tree)
    assert family.tree(words).complete() == tree.complete()
    with pytest.raises(UsageError, match="'2b'"):
        llama("2b", 256)


def test_texts_are_documents(tmp_path: Path) -> None:
    cfg = get("pretrain")(texts(tmp_path), split="blank")
    assert cfg.train.source.get("source.source.mode") == "cut"
