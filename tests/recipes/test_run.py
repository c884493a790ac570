"""A whole run: what it begins from, what it leaves, what it refuses, and that it goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Int4, Int8, Plain
from orchard.nn.linear import Linear
from orchard.objectives.distill import Distill
from orchard.recipes import Adapter, Run, get
from orchard.recipes.same import OtherRun, put_aside
from orchard.train.ema import EMA
from orchard.weights.adapters import OtherBase
from tests.recipes.small import SMALL, fresh, preferences, talks
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("base") / "tiny.gguf"))


@pytest.fixture(scope="module")
def packed(base: str) -> str:
    """The same model in eight bits."""
    path = Path(base).with_name("packed.gguf")
    orchard.load(base).save(path, type="q8_0")
    return str(path)


def adapting(folder: Path, base: str, **fields: Any) -> Run.Config:
    cfg = get("lora")(talks(folder), base, r=4, alpha=8, lr=1e-2, **SMALL)
    return cfg.clone(adapter=cfg.adapter.clone(**fields))  # type: ignore[union-attr]


def scores(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(torch.tensor([ids]))
    return out


IDS = [257, *b"user 3", 258]


def test_a_fresh_model_is_saved_as_it_was_trained(tmp_path: Path) -> None:
    run = fresh(tmp_path).build(folder=tmp_path / "run")
    report = run.start()
    model = orchard.load(tmp_path / "run" / "model", dtype="float32")
    assert torch.equal(model.logits([256, *b"The"]), scores(run.begun.model, [256, *b"The"]))
    text = "Straße, 3 €\n\t<|end|>"
    assert model.tokenizer.encode(text, bos=True) == [256, *text.encode()] and model.tokenizer.add_bos
    assert f"the model is in {run.result}" in report.notes
    assert {"report.json", "run.json", "model"} <= {path.name for path in (tmp_path / "run").iterdir()}
    facts = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert facts["model_type"] == "llama" and facts["eos_token_id"] == 257


def test_others_read_what_was_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = fresh(tmp_path).build(folder=tmp_path / "run")
    run.start()
    other = AutoModelForCausalLM.from_pretrained(run.result, dtype=torch.float32)
    ids = [256, *b"The number"]
    assert torch.allclose(other(torch.tensor([ids])).logits, scores(run.begun.model, ids), atol=1e-4)
    assert AutoTokenizer.from_pretrained(run.result).decode(ids[1:]) == "The number"


def test_what_is_kept_of_a_run_with_averages_are_the_averages(tmp_path: Path) -> None:
    cfg = fresh(tmp_path)
    run = cfg.clone(train=cfg.train.clone(ema=EMA.Config(decay=0.5, ramp=False))).build(folder=tmp_path / "run")
    run.start()
    assert run.trainer.ema is not None
    with run.trainer.ema.applied(run.begun.model):
        wanted = scores(run.begun.model, [256, 65])
    found = orchard.load(tmp_path / "run" / "model", dtype="float32").logits([256, 65])
    assert torch.equal(found, wanted) and not torch.equal(found, scores(run.begun.model, [256, 65]))


@pytest.mark.parametrize(
    ("packs", "fields", "kind"),
    [
        (False, {}, Plain),
        (True, {}, Int8),
        (True, {"unpack": True}, Plain),
        (False, {"quantize": "q8_0"}, Int8),
        (False, {"quantize": "q4_0"}, Int4),
    ],
)
def test_adapters_learn_beside_any_base(
    tmp_path: Path, base: str, packed: str, packs: bool, fields: dict[str, Any], kind: type
) -> None:
    source = packed if packs else base
    run = adapting(tmp_path, source, **fields).build(folder=tmp_path / "run")
    linear = run.begun.model.get_submodule("stack.layers.0.mixer.q")
    assert isinstance(linear, Linear) and isinstance(linear.format, kind)
    before = {name: value.clone() for name, value in run.begun.model.state_dict().items() if "lora" not in name}
    losses = run.start().series["loss"]
    assert losses[-1] < losses[0]
    after = run.begun.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "the base stays as it was"
    if not fields:  # a base that was packed for the run alone is another model than the one in the library
        model = orchard.load(source, dtype="float32")
        model.adapters.load(run.result, "mine")
        assert torch.allclose(model.adapters.model("mine").logits(IDS), scores(run.begun.model, IDS), atol=1e-4)


def test_an_adapter_is_signed(tmp_path: Path, base: str) -> None:
    other = tiny_gguf(tmp_path / "other.gguf")
    run = adapting(tmp_path, base).build(folder=tmp_path / "run")
    run.start()
    facts = json.loads((run.result / "adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == base and facts["orchard_base"].startswith("1:")
    orchard.load(other).adapters.load(run.result)  # the same weights elsewhere are the same model
    fresh(tmp_path).build(folder=tmp_path / "fresh").start()
    with pytest.raises(OtherBase):
        orchard.load(tmp_path / "fresh" / "model").adapters.load(run.result)


def test_with_an_adapter_teacher_and_reference_are_the_base_itself(tmp_path: Path, base: str) -> None:
    cfg = get("dpo")(preferences(tmp_path), base, r=4, **SMALL)
    run = cfg.build(folder=tmp_path / "run")
    objective: Any = run.trainer.objective
    assert objective.reference is run.begun.base
    side, own = (model.get_submodule("stack.layers.0.mixer.q") for model in (run.begun.model, run.begun.base))  # type: ignore[union-attr]
    assert side.weight is own.weight and not hasattr(own, "lora_a")
    run.start()
    assert torch.equal(scores(run.begun.base, IDS), orchard.load(base, dtype="float32").logits(IDS))


def test_a_model_may_learn_from_what_it_was(tmp_path: Path, base: str) -> None:
    cfg = adapting(tmp_path, base).clone(teacher="base")
    report = cfg.clone(train=cfg.train.clone(objective=Distill.Config())).build(folder=tmp_path / "run").start()
    assert report.series["kl"][0] == pytest.approx(0, abs=1e-6)


def test_a_base_can_be_rewritten(tmp_path: Path, base: str) -> None:
    cfg = adapting(tmp_path, base).clone(adapter=None, rewrites=[Renamed.Config(context=128)])
    assert cfg.build(folder=tmp_path / "run").begun.model.config.context == 128


class Renamed(Configurable):
    """A change of a tree."""

    @config
    class Config(BaseConfig):
        context: int = 0

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, tree: Any) -> Any:
        return tree.clone(context=self.config.context)


# Going on ---------------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_leaves_the_same_model(tmp_path: Path, base: str) -> None:
    def stop(number: int, point: Any) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    cfg = adapting(tmp_path, base, dropout=0.1)
    cfg.build(folder=tmp_path / "whole").start()
    with pytest.raises(KeyboardInterrupt):
        cfg.build(folder=tmp_path / "parts").start(told=[stop])
    assert not (tmp_path / "parts" / "adapter").exists()
    cfg.build(folder=tmp_path / "parts").start()
    one, other = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "parts")
    )
    assert one == other


def test_a_run_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    report = fresh(tmp_path).build(folder=tmp_path / "run").start()
    stamp = (tmp_path / "run" / "model" / "config.json").stat().st_mtime_ns
    again = fresh(tmp_path).build(folder=tmp_path / "run")
    told: list[int] = []
    assert again.start(told=[lambda number, point: told.append(number)]).series == report.series and not told
    assert (tmp_path / "run" / "model" / "config.json").stat().st_mtime_ns == stamp
    found = orchard.load(tmp_path / "run" / "model", dtype="float32").logits([256, 65])
    assert torch.equal(scores(again.begun.model, [256, 65]), found)


def test_another_config_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    fresh(tmp_path).build(folder=tmp_path / "run").start()
    with pytest.raises(OtherRun, match=r"train\.optim\.lr: 0\.01 → 0\.002") as caught:
        fresh(tmp_path, lr=2e-3).build(folder=tmp_path / "run")
    assert "--force-new" in caught.value.hint
    cfg = fresh(tmp_path)
    cfg.train.save.every, cfg.device = 1, "cpu"  # what the weights do not depend on
    cfg.build(folder=tmp_path / "run").trainer.close()
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(OtherRun, match="cannot be understood"):
        fresh(tmp_path).build(folder=tmp_path / "run")
    assert put_aside(tmp_path / "run") == tmp_path / "run.before-1" and not (tmp_path / "run").exists()
    fresh(tmp_path).build(folder=tmp_path / "run").trainer.close()
    (tmp_path / "run").mkdir(exist_ok=True)
    assert put_aside(tmp_path / "run") == tmp_path / "run.before-2" and put_aside(tmp_path / "run") is None


def test_a_result_that_cannot_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchard.weights import folder

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_fill", full)
        with pytest.raises(orchard.OrchardError, match="no room"):
            fresh(tmp_path).build(folder=tmp_path / "run").start()
    assert not (tmp_path / "run" / "model").exists()
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith(".part")]
    fresh(tmp_path).build(folder=tmp_path / "run").start()
    assert (tmp_path / "run" / "model").is_dir()


def test_a_model_that_no_family_has_stays_in_its_checkpoint(tmp_path: Path) -> None:
    cfg = fresh(tmp_path, steps=2)
    cfg.train.model.softcap = 30.0  # type: ignore[union-attr]
    run = cfg.build(folder=tmp_path / "run")
    notes = run.start().notes
    assert any("in the last checkpoint only" in note and "softcap" in note for note in notes)
    assert not run.result.exists()


# Refusals ---------------------------------------------------------------------------------------------------------------


def test_what_makes_no_run_is_refused(tmp_path: Path, base: str) -> None:
    good, adapted = fresh(tmp_path), adapting(tmp_path, base)
    for cfg, words in [
        (good.clone(tokenizer=None), "no tokenizer"),
        (good.clone(train=good.train.clone(model=None)), "no model to begin from"),
        (good.clone(base=base), "a base and a tree"),
        (good.clone(adapter=Adapter.Config()), "an adapter beside fresh weights"),
        (good.clone(teacher="base"), "no base to learn from"),
        (adapted.clone(adapter=Adapter.Config(method="ia3")), "'ia3'"),
        (adapted.clone(adapter=Adapter.Config(quantize="q3")), "'q3'"),
        (adapted.clone(adapter=Adapter.Config(quantize="q8_0", unpack=True)), "opposites"),
        (adapted.clone(tokenizer="bytes", base=None), "no model to begin from"),
    ]:
        with pytest.raises(ConfigError, match=words):
            cfg.build(folder=tmp_path / "run")


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path, base: str) -> None:
    with pytest.raises(ConfigError, match="rows of 512 tokens for a model with a context of 256"):
        get("lora")(talks(tmp_path), base, length=512).build(folder=tmp_path / "run")
    small = fresh(tmp_path)
    small.train.model.vocab = 100  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="258 tokens and the model 100"):
        small.build(folder=tmp_path / "run")
    with pytest.raises(UnsupportedPair, match="NextToken has no use for a reference"):
        adapting(tmp_path, base).clone(reference=True).build(folder=tmp_path / "run")
    plain = adapting(tmp_path, base)
    with pytest.raises(ConfigError, match="Distill needs a teacher"):
        plain.clone(train=plain.train.clone(objective=Distill.Config())).build(folder=tmp_path / "run")
    with pytest.raises(orchard.OrchardError, match="no model called"):
        get("lora")(talks(tmp_path), "nobody").build(folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
