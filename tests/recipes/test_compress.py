"""`compress`: somebody else's small model becomes a smaller file, measured at every step, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from orchard.core.errors import ConfigError, DiskFull, UsageError
from orchard.core.report import Report
from orchard.recipes.compress import Compressed, compress, forecast, take_over
from orchard.recipes.compressing import result as results
from orchard.recipes.compressing.card import shown
from orchard.recipes.compressing.plan import BadPlan, read_plan
from orchard.recipes.compressing.result import NothingGood
from orchard.recipes.compressing.work import OtherWork
from orchard.session.model import load
from orchard.transforms.mixed import BudgetImpossible
from orchard.weights.checkpoint import open_checkpoint
from tests.recipes.compressed_models import sentences, trained_folder

SMALL: dict[str, Any] = {
    "held": 128,
    "looked": 256,
    "length": 32,
    "rows": 4,
    "dtype": "float32",
    "device": "cpu",
    "tokens": 1024,
}
PLAN = ["share-kv:last=1", "heal", "qat:bits=4,embedding=4", "kv8"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("models") / "qwen2", steps=25)


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Compressed:
    target = tmp_path_factory.mktemp("made") / "small.orchard"
    return compress(base, PLAN, target, stop="loss<1.5,kl<3", budget="8bpw", **SMALL)


def test_a_model_of_another_family_end_to_end(base: Path, made: Compressed) -> None:
    facts = made.to_dict()
    assert made.path.stat().st_size == made.bytes == facts["bytes"] == facts["accounting"]["total"]
    assert made.bits == pytest.approx(8 * made.bytes / facts["accounting"]["dense_weights"], abs=1e-4)
    assert made.bytes < 0.2 * facts["original_bytes"]
    assert facts["kv_bytes_per_token"] < 0.5 * facts["original_kv_bytes_per_token"], "shared, and in eight bits"
    assert [one["step"] for one in facts["steps"]] == PLAN and facts["kept_steps"] == 4 and made.stopped is None
    assert set(facts["measured"]["kinds"]) == {"plain", "chat", "calm"}
    ratios = [one["measured"]["all"]["kl"] for one in facts["steps"]]
    assert 0 < made.measured.all.kl < 1 and all(kl < 1 for kl in ratios)
    with open_checkpoint(made.path) as checkpoint:
        tree = checkpoint.config()
        assert checkpoint.format == "orchard" and checkpoint.source.made["plan"] == PLAN  # type: ignore[union-attr]
    assert [block.mixer.store.owner for block in tree.stack.layers] == [None, None, 1]  # type: ignore[attr-defined]
    answer = load(made.path, device="cpu").generate("Where is the apple?", max_tokens=4)
    assert len(answer.ids) > 0


def test_what_it_leaves_to_read(made: Compressed) -> None:
    facts = made.to_dict()
    card = Path(facts["card"]).read_text()
    assert f"{made.bits:.2f} bits per weight" in card and "orchard chat --model small.orchard" in card
    assert all(f"`{step}`" in card for step in PLAN) and f"{made.bytes:,}" in card and "## Licence" in card
    report = Report.load(facts["report"])
    assert report.kind == "compress" and report.passed and {one.id for one in report.claims} == {"loss", "kl", "budget"}
    assert report["bytes"] == made.bytes and report["loss, chat"] is not None
    points = report.series["KL while learning"]
    assert points and [point[0] for point in points] == sorted(point[0] for point in points)
    assert len(report.series["loss ratio after each step, plain"]) == 4
    folder = Path(facts["report"]).parent
    assert {path.name for path in folder.iterdir()} <= {
        *("plan.json", ".lock", "result.json", "report.json", "report.html", "curves.png"),
    }, "what was needed on the way is gone"
    json.dumps(facts, allow_nan=False)


def test_sizes_are_known_before(base: Path, made: Compressed) -> None:
    _, found = forecast(base, PLAN, budget="8bpw", **SMALL)
    size = found.size
    assert 0 <= size.file - made.bytes < 256, "but for some bytes of the header"
    assert size.kv == made.to_dict()["kv_bytes_per_token"] and size.read == made.to_dict()["bytes_read_per_token"]
    assert found.seconds is not None and found.tokens == 1024
    table = shown(found)
    assert all(word in table for word in PLAN) and "guess" in table and "an estimate" in table
    _, fast = forecast(base, "int8", bandwidth=lambda size: 1e9, **SMALL)
    assert fast.speed is not None and fast.speed[1] > fast.speed[0] > 0


def test_the_same_seed_measures_the_same(base: Path, tmp_path: Path) -> None:
    """That it also learns the same is told by runs that were interrupted."""
    runs = [compress(base, ["rtn:bits=4"], tmp_path / f"{n}.orchard", **SMALL) for n in range(2)]
    assert runs[0].path.read_bytes() == runs[1].path.read_bytes() and runs[0].measured == runs[1].measured


def test_interrupted_anywhere_it_goes_on(base: Path, made: Compressed, tmp_path: Path) -> None:
    """Ctrl-C at everything it says, and after every few steps of training: the file is the same, and nothing is done twice."""
    said: list[str] = []

    def say(line: str) -> None:
        if line not in said and not line.startswith((" ", "text")):
            said.append(line)
            raise KeyboardInterrupt
        if line.startswith("step "):
            begun.append(line)

    def told(step: int, point: Any) -> None:
        if (key := f"{len(begun)}: {step}") not in said and step % 3 == 0:
            said.append(key)
            raise KeyboardInterrupt

    stops, begun = 0, []
    while True:
        begun.clear()
        try:
            found = compress(
                base,
                PLAN,
                tmp_path / "small.orchard",
                stop="loss<1.5,kl<3",
                budget="8bpw",
                say=say,
                told=[told],
                **SMALL,
            )
            break
        except KeyboardInterrupt:
            stops += 1
            assert not (tmp_path / "small.orchard").exists()
    assert stops >= 10 and len(begun) <= 1, "finished steps are not done again"
    assert found.path.read_bytes() == made.path.read_bytes()
    heard: list[str] = []
    same = compress(
        base, PLAN, found.path, stop="loss<1.5,kl<3", budget="8bpw", say=heard.append, **SMALL
    )  # of what is done, the same again
    assert not heard and same.to_dict() == found.to_dict()


def test_other_arguments_are_refused(base: Path, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("step 2"):
            raise KeyboardInterrupt

    target = tmp_path / "x.orchard"
    with pytest.raises(KeyboardInterrupt):
        compress(base, ["rtn:bits=8", "kv8"], target, say=stop, **SMALL)
    for words, more, says in (
        (["rtn:bits=4", "kv8"], {}, 'another plan: ["rtn:bits=8", "kv8"], not ["rtn:bits=4", "kv8"]'),
        (["rtn:bits=8", "kv8"], {"seed": 1}, "another seed: 0, not 1"),
        (["rtn:bits=8", "kv8"], {"stop": "kl<9"}, "another stop"),
        (["rtn:bits=8", "kv8"], {"budget": "20bpw"}, "another budget"),
    ):
        with pytest.raises(OtherWork) as caught:
            compress(base, words, target, **{**SMALL, **more})  # type: ignore[arg-type]
        assert says in caught.value.message and "delete that folder" in caught.value.hint
    with FileLock(str(tmp_path / "x.work" / ".lock")), pytest.raises(OtherWork, match="another process is at work"):
        compress(base, ["rtn:bits=8", "kv8"], target, **SMALL)
    (tmp_path / "y.work").mkdir()
    (tmp_path / "y.work" / "mine.txt").write_text("x")
    with pytest.raises(OtherWork, match="holds no compression"):
        compress(base, ["kv8"], tmp_path / "y.orchard", **SMALL)


def test_two_plans_share_what_they_begin_with(base: Path, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("step 2"):
            raise KeyboardInterrupt

    one, two = tmp_path / "one.orchard", tmp_path / "two.orchard"
    with pytest.raises(KeyboardInterrupt):
        compress(base, ["share-kv:last=1", "rtn:bits=8"], one, say=stop, **SMALL)
    with pytest.raises(OtherWork, match="another seed"):
        take_over(base, ["share-kv:last=1", "kv8"], two, other=one, **{**SMALL, "seed": 3})
    assert take_over(base, ["kv8"], tmp_path / "three.orchard", other=one, **SMALL) == 0, "only the text"
    assert take_over(base, ["share-kv:last=1", "kv8"], two, other=one, **SMALL) == 1
    with pytest.raises(OtherWork, match="has begun already"):
        take_over(base, ["share-kv:last=1", "kv8"], two, other=one, **SMALL)
    heard: list[str] = []
    found = compress(base, ["share-kv:last=1", "kv8"], two, say=heard.append, **SMALL)
    assert not any(line.startswith(("step 1", "writing text")) for line in heard)
    assert any(line.startswith("step 2") for line in heard) and len(found.to_dict()["steps"]) == 2
    with pytest.raises(OtherWork, match="holds no compression"):
        take_over(base, ["kv8"], tmp_path / "four.orchard", other=tmp_path / "nothing.orchard", **SMALL)


def test_the_rule_stops_it_and_the_last_good_model_stays(base: Path, tmp_path: Path) -> None:
    found = compress(base, ["rtn:bits=8", "embed8", "share-kv:last=2"], tmp_path / "x.orchard", stop="kl<1e-3", **SMALL)
    facts = found.to_dict()
    assert found.stopped is not None and "kl<0.001 does not hold" in found.stopped and facts["kept_steps"] == 2
    assert found.measured.all.kl < 1e-3 and len(facts["steps"]) == 3
    assert "stopped" in Path(facts["card"]).read_text() and found.report.passed
    assert any("stopped" in note for note in found.report.notes)
    with pytest.raises(NothingGood, match="agreement>1 does not hold") as caught:
        compress(base, "int4", tmp_path / "y.orchard", stop="agreement>1", **SMALL)
    assert "y.work" in caught.value.hint and not (tmp_path / "y.orchard").exists()


def test_a_step_is_judged_with_the_one_that_mends_it(base: Path, tmp_path: Path) -> None:
    found = compress(base, ["share-kv:last=2", "heal:tokens=2048"], tmp_path / "x.orchard", stop="kl<0.5", **SMALL)
    first, second = found.to_dict()["steps"]
    assert not first["judged"] and second["judged"] and found.stopped is None
    assert second["measured"]["all"]["kl"] < 0.5 and first["broken"] is None


def test_somebodys_own_text_and_tasks(base: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(sentences(60, seed=5)))
    asked: list[int] = []

    def tasks(model: Any) -> dict[str, float]:
        asked.append(len(model.generate("The", max_tokens=2).ids))
        return {"words": 0.5}

    words = ["gptq:bits=4", "recover:r=2,tokens=512"]
    found = compress(base, words, tmp_path / "x.orchard", text=[text], own=0.25, tasks=tasks, stop="tasks>0.4", **SMALL)
    facts = found.to_dict()
    assert set(facts["measured"]["kinds"]) == {"plain", "chat", "calm", "text"} and facts["text"] == [str(text)]
    assert facts["measured"]["tasks"] == facts["original_tasks"] == {"words": 0.5} and len(asked) == 4
    assert "task" in Path(facts["card"]).read_text() and found.report["task, words"] == 0.5
    with pytest.raises(UsageError, match="unknown ending"):
        compress(base, words, tmp_path / "y.orchard", text=[base / "config.json"], **SMALL)
    text.write_text("Too short.")
    with pytest.raises(UsageError, match="too few"):
        compress(base, words, tmp_path / "z.orchard", text=[text], **SMALL)


def test_bits_are_chosen_under_the_budget(base: Path, tmp_path: Path) -> None:
    words = ["mixed:by=rtn", "embed8"]
    _, found = forecast(base, words, budget="9bpw", **SMALL)
    least, most = found.last.least.file, found.last.most.file
    assert least < most <= found.size.file <= found.budget  # type: ignore[operator]
    budget = (least + most) // 2
    made = compress(base, words, tmp_path / "x.orchard", budget=f"{budget}B", **SMALL)
    assert budget - 2048 < made.bytes <= budget and {one.id: one.passed for one in made.report.claims} == {
        "budget": True
    }
    assert set(made.to_dict()["accounting"]["weights"]) == {"Int2", "Int4"}
    with pytest.raises(BudgetImpossible) as caught:
        forecast(base, words, budget=f"{least - 1}B", **SMALL)
    assert caught.value.smallest_bytes == least
    with pytest.raises(BadPlan, match="chooses under a budget"):
        forecast(base, words, **SMALL)


# What is refused before anything is done --------------------------------------------------------------------------------


def test_a_budget_that_cannot_be_kept(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetImpossible) as caught:
        compress(base, "int8", tmp_path / "x.orchard", budget="7bpw", **SMALL)
    assert "bits per weight" in caught.value.message and caught.value.exit_code == 2
    assert "the nearest that can is " in caught.value.hint
    with pytest.raises(BudgetImpossible) as caught:
        forecast(base, "2bit", budget="1bpw", **SMALL)
    assert "no ready plan does; the smallest is " in caught.value.hint
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rtn:bits=4", "gptq:bits=2"], "step 2 (gptq:bits=2) packs what is packed already"),
        (["rtn:bits=4", "heal"], "step 2 (heal) trains weights that are packed already"),
        (["share-kv:last=9"], "step 1 (share-kv:last=9): 9 of 3 layers"),
        (["kv8", "kv8"], "step 2 (kv8) changes nothing here"),
        (['rtn:targets=["z"]'], "no weight is called 'z'"),
    ],
)
def test_plans_that_cannot_be(words: list[str], says: str, base: Path) -> None:
    with pytest.raises(BadPlan) as caught:
        forecast(base, read_plan(words), **SMALL)
    assert says in caught.value.message and caught.value.hint


def test_shapes_that_a_format_cannot_hold_are_named(base: Path) -> None:
    _, found = forecast(base, ["rtn:bits=4,group=96"], **SMALL)
    assert any("mixer.q" in note and "instead" in note for note in found.notes)


def test_a_model_with_numbers_that_are_none(base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        compress(broken, "int4", tmp_path / "x.orchard", **SMALL)
    assert "1 values of stack.layers.1.mlp.up.weight are not finite" in caught.value.message and caught.value.hint
    assert not (tmp_path / "x.work").exists()


def test_targets_that_cannot_be(base: Path, tmp_path: Path) -> None:
    (tmp_path / "there.orchard").write_text("x")
    for target, says in (
        ("x.gguf", "ends in .orchard"),
        ("no/x.orchard", "no folder"),
        ("there.orchard", "there already"),
    ):
        with pytest.raises(UsageError) as caught:
            compress(base, "kv8", tmp_path / target, **SMALL)
        assert says in f"{caught.value.message} {caught.value.hint}"
    assert (tmp_path / "there.orchard").read_text() == "x"
    found = compress(base, "kv8", tmp_path / "there.orchard", force=True, **SMALL)
    assert found.bytes > 1000


def test_a_disk_that_is_full_at_the_end(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(results, "save_built", full)
    with pytest.raises(DiskFull):
        compress(base, ["rtn:bits=8"], tmp_path / "x.orchard", **SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {"x.work"}, "nothing half-written"
    monkeypatch.undo()
    said: list[str] = []
    compress(base, ["rtn:bits=8"], tmp_path / "x.orchard", say=said.append, **SMALL)
    assert not any(line.startswith("step 1") for line in said), "what was done is not done again"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_it_has_never_seen(tmp_path: Path) -> None:
    """The bar: another family, trained for two minutes, through the whole of a plan on two cores."""
    base = trained_folder(tmp_path / "gemma3", "gemma3", seconds=120)
    asked = {**SMALL, "tokens": 20_000, "held": 1024, "looked": 1024, "length": 64}
    plan = ["share-kv", "heal", "mixed:train=true", "recover:r=2", "kv8"]
    found = compress(base, plan, tmp_path / "small.orchard", budget="5.5bpw", **asked)
    assert found.stopped is None and found.bits <= 5.5
    assert found.measured.all.ratio < 1.3
    assert load(found.path, device="cpu").generate("Where is the apple?", max_tokens=8).ids
