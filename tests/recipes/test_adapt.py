"""`adapt`: a tiny model learns from a few samples, whatever interrupts it, and what it leaves is for that model alone."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.core.errors import DiskFull, UsageError
from orchard.data.errors import BadSample
from orchard.recipes import package as packages
from orchard.recipes.adapt import Adapted, adapt, check
from orchard.recipes.adapt_plan import Shape, plan
from orchard.recipes.package import About
from orchard.session.model import load
from orchard.weights.adapters import OtherBase, read_adapter
from orchard.weights.package import read_package
from tests.recipes.test_adapt_rows import CHATML
from tests.tiny import tiny_gguf

FAST = ["train.optim.lr=0.02", "train.dtype=float32"]
SMALL: dict[str, Any] = {"rank": 4, "settings": FAST, "device": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "tiny.gguf"
    return tiny_gguf(path, **{"tokenizer.chat_template": CHATML})


def samples(folder: Path, count: int = 40) -> Path:
    path = folder / "samples.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"<{n % 3}>"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("made")
    about = About(author="A. Person", licence="mit")
    return adapt(base, samples(folder), folder / "mine", about=about, steps=12, **SMALL)


def test_it_learns_and_measures_and_packs(base: Path, made: Adapted) -> None:
    package = read_package(made.package.path)
    assert package == made.package and package.name == "mine" and package.author == "A. Person"
    assert package.training["steps"] == 12 and package.training["samples"] == 36
    assert made.losses.before is not None and made.losses.after is not None
    assert made.losses.after < 0.7 * made.losses.before
    assert package.training["loss"] == {"before": made.losses.before, "after": made.losses.after}
    assert made.answers is not None and made.answers.asked == 4
    card = (package.path / "README.md").read_text()
    assert f"{made.losses.after:.4f} after" in card and "of 4 before" in card
    left = {path.name for path in made.run.iterdir()}
    assert "report.json" in left and left <= {"report.json", "report.html", "curves.png"}
    model = load(base, device="cpu")
    name = model.adapters.load(package.path)
    assert model.adapters.model(name).generate("say 1", max_tokens=4).ids != model.generate("say 1", max_tokens=4).ids


def test_the_loss_it_tells_is_that_of_the_package(base: Path, made: Adapted) -> None:
    """Held-out rows by hand, with the adapter loaded from the package, by another way through the model."""
    from orchard.data.chat import conversation
    from orchard.recipes.adapt_data import look, parted

    model = load(base, device="cpu", dtype="float32")
    looked = look(made.package.path.parent / "samples.jsonl", model.tokenizer, 256)
    _, held = parted(looked, 0.1, seed=0)
    model.adapters.load(made.package.path)
    found = []
    for one in (model, model.adapters.model("mine")):
        losses = []
        for number in held:
            sample = conversation(model.tokenizer, looked.rows[number]["messages"])
            scores = one.logits(sample.ids.tolist())[0].log_softmax(-1)
            losses += [-scores[i - 1, sample.ids[i]].item() for i in np.flatnonzero(sample.learnt)]
        found.append(sum(losses) / len(losses))
    assert found == pytest.approx([made.losses.before, made.losses.after], rel=1e-3)


def test_a_run_that_was_interrupted_goes_on(base: Path, made: Adapted, tmp_path: Path) -> None:
    def stop(step: int, point: Any) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    data = samples(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        adapt(base, data, tmp_path / "mine", steps=12, told=[stop], **SMALL)
    assert not (tmp_path / "mine").exists() and (tmp_path / "mine.run").is_dir()
    with pytest.raises(UsageError) as said:
        adapt(base, data, tmp_path / "mine", steps=13, **SMALL)
    assert "another config" in str(said.value) and "delete that folder" in said.value.hint
    data.write_text(data.read_text().replace("say 3", "say X"))
    with pytest.raises(UsageError, match="other data"):
        adapt(base, data, tmp_path / "mine", steps=12, **SMALL)
    steps: list[int] = []
    found = adapt(base, samples(tmp_path), tmp_path / "mine", steps=12, told=[lambda n, _: steps.append(n)], **SMALL)
    assert steps == list(range(6, 13)), "nothing is learnt twice"
    assert read_adapter(found.package.path).digest == read_adapter(made.package.path).digest, "bit for bit"
    assert found.losses == made.losses


def test_a_disk_that_is_full_at_the_end(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = samples(tmp_path)
    monkeypatch.setattr(packages.shutil, "copyfile", full)
    with pytest.raises(DiskFull):
        adapt(base, data, tmp_path / "mine", steps=2, **SMALL)
    assert not (tmp_path / "mine").exists()
    monkeypatch.undo()
    steps: list[int] = []
    adapt(base, data, tmp_path / "mine", steps=2, told=[lambda n, _: steps.append(n)], **SMALL)
    assert not steps and read_package(tmp_path / "mine"), "what was learnt is not learnt again"


def test_it_is_for_its_own_base(base: Path, made: Adapted, tmp_path: Path, monkeypatch: Any) -> None:
    true = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: true(7))
    other = tiny_gguf(tmp_path / "other.gguf", **{"tokenizer.chat_template": CHATML})
    monkeypatch.undo()
    with pytest.raises(OtherBase, match="tiny"):
        load(other, device="cpu").adapters.load(made.package.path)


def test_bad_lines_stop_it_or_are_left_out(base: Path, tmp_path: Path) -> None:
    data = samples(tmp_path)
    data.write_text('{"prompt": \n' + data.read_text())
    with pytest.raises(BadSample, match=r"samples\.jsonl:1"):
        adapt(base, data, tmp_path / "mine", steps=1, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.jsonl"]
    found = adapt(base, data, tmp_path / "mine", steps=1, on_bad="skip", held_out=0, **SMALL)
    assert "1 lines were left out" in found.notes[0] and found.losses.after is None and found.answers is None
    assert found.package.training["samples"] == 40 and "held-out" not in (tmp_path / "mine" / "README.md").read_text()


def test_a_file_that_is_held_out(base: Path, tmp_path: Path) -> None:
    data = samples(tmp_path, 8)
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "say 1", "completion": "<1>"}) + "\n")
    found = adapt(base, data, tmp_path / "mine", steps=1, held_out=str(held), **SMALL)
    assert "1 held-out samples are in the training data" in found.notes[0]
    assert found.package.training["samples"] == 8 and found.answers is not None and found.answers.asked == 1
    with pytest.raises(UsageError, match="there already"):
        adapt(base, data, tmp_path / "mine", steps=1, **SMALL)
    number = {"type": "integer"}
    held.write_text(json.dumps({"prompt": "say 1", "completion": "1", "schema": number}) + "\n")
    other = adapt(base, data, tmp_path / "other", steps=1, held_out=str(held), **SMALL)
    assert not other.notes and other.losses.after is not None, "one with a schema, the other without"


def test_check_trains_nothing(base: Path, tmp_path: Path) -> None:
    found = check(base, samples(tmp_path), rank=4)
    assert (found.train, found.held, found.looked.samples, found.looked.problems) == (36, 4, 40, [])
    assert found.steps == 14 and found.seconds > 0 and len(list(tmp_path.iterdir())) == 1


def test_plans(base: Path, tmp_path: Path) -> None:
    def made(rows: int, tokens: int, longest: int, **more: Any) -> Any:
        shape = Shape(tmp_path / "t.jsonl", None, rows, tokens, longest, "all", 256)
        return plan(str(base), shape, device="cpu", **more)

    even, uneven = made(200, 20_000, 120), made(200, 20_000, 250)
    assert even.get("train.source.source.length") == 128 and made(3, 30, 251).get("train.source.source.length") == 256
    assert even.train.steps == 75 and even.get("train.source.source.source.mode") == "padded"
    assert uneven.get("train.source.source.source.mode") == "packed" and 60 <= uneven.train.steps <= 90
    assert made(3, 30, 10).train.steps == 3 and made(3, 30, 10, steps=9).train.steps == 9
    packed = made(8, 80, 10, method="qlora").adapter
    assert not packed.unpack and packed.method == "lora" and even.adapter.unpack
    assert made(8, 80, 10, method="rslora", rank=8).adapter.r == 8
    for wrong in ({"method": "full"}, {"rank": 0}, {"epochs": 0}, {"settings": ["train.optim.rate=1"]}):
        with pytest.raises(UsageError):
            made(8, 80, 10, **wrong)


def test_a_draft_comes_along(tmp_path: Path, monkeypatch: Any) -> None:
    from functools import partial

    from orchard.recipes import draft
    from tests.session.export_models import folder_of

    source = folder_of(tmp_path / "source")
    monkeypatch.setattr(draft, "distil_draft", partial(draft.distil_draft, steps=2, max_tokens=4))
    found = adapt(source, samples(tmp_path, 6), tmp_path / "mine", steps=2, draft=True, **SMALL)
    assert found.package.draft == tmp_path / "mine" / "draft.gguf" and found.package.draft.is_file()
    assert "draft.gguf" in (tmp_path / "mine" / "README.md").read_text()
    model = load(source, device="cpu")
    variant = model.adapters.model(model.adapters.load(found.package.path))
    plain = model.adapters.model(model.adapters.load(_without_draft(found.package.path, tmp_path / "plain")))
    assert variant.draft is not None and plain.draft is None
    assert variant.generate("say 1", max_tokens=8).ids == plain.generate("say 1", max_tokens=8).ids


def _without_draft(package: Path, to: Path) -> Path:
    """The adapter alone, as PEFT knows it."""
    to.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (to / name).write_bytes((package / name).read_bytes())
    return to
