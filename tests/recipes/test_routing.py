"""`--with route-kv` and `--with retain`, and the steps of the same names: trained, written, read again, asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.cli.main import main
from orchard.cli.train_words import config_of
from orchard.core.errors import ConfigError, UsageError
from orchard.nn.attention import Attention
from orchard.recipes import get
from orchard.recipes.changes import get_change
from orchard.recipes.compress import compress, forecast
from orchard.recipes.compressing.plan import BadPlan, read_plan
from tests.recipes.small import SMALL, talks, texts

IDS = [256, *b"The number 3"]
PLAN: dict[str, Any] = {"held": 64, "looked": 128, "length": 16, "rows": 2, "dtype": "float32", "tokens": 256}


def owners(tree: Any) -> list[int | None]:
    return [node.store.owner for _, node in tree.find(Attention)]


def asked(folder: Path, *changes: str) -> Any:
    """A run as the command line asks for it, with four narrow layers."""
    words = [texts(folder), "size=1m", "split=blank", "lr=1e-2", *(f"{key}={value}" for key, value in SMALL.items())]
    cfg = config_of("pretrain", words, changes=changes)
    tree: Any = cfg.train.model
    for layer in tree.stack.layers:
        layer.mlp.hidden_dim = 32
    return cfg.complete()


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learnt with routing, as a folder."""
    folder = tmp_path_factory.mktemp("routed")
    run = asked(folder, "route-kv:p_borrow=0.9").build(folder=folder / "run")
    borrows = [node.borrow for _, node in run.begun.model.config.find(Attention)]
    assert borrows[0] is None and [one.layers for one in borrows[1:]] == [tuple(range(n)) for n in range(1, 5)]
    run.start()
    with torch.no_grad():
        wanted = run.begun.model.eval()(torch.tensor([IDS]))
    made = orchard.load(run.result, dtype="float32")
    assert run.result.name == "model" and torch.equal(made.logits(IDS), wanted)
    assert all(node.borrow is None for _, node in made.config.find(Attention)), "what is left is a plain Llama"
    return Path(run.result)


def test_a_fixed_pattern_is_trained_from_nothing_and_left_as_a_file(tmp_path: Path) -> None:
    run = asked(tmp_path, "retain:layers=[0,3]", "route-kv").build(folder=tmp_path / "run")
    assert [node.borrow is None for _, node in run.begun.model.config.find(Attention)] == [True] * 3 + [False, True]
    report = run.start()
    assert run.result.name == "model.orchard" and f"the model.orchard is in {run.result}" in report.notes
    made = orchard.load(run.result, dtype="float32")
    assert owners(made.config) == [None, 0, 0, None, 3]
    assert all(node.borrow is None for _, node in made.config.find(Attention))
    with torch.no_grad():
        assert torch.allclose(made.logits(IDS), run.begun.model.eval()(torch.tensor([IDS])), atol=2e-2)
    assert made.generate("The number 3", max_tokens=4).finish in ("length", "stop")
    again = asked(tmp_path, "retain:layers=[0,3]", "route-kv").build(folder=tmp_path / "run")
    assert again.start().created == report.created, "it is done"


def test_a_trained_model_is_routed_with_and_without_side_paths(tmp_path: Path, routed: Path) -> None:
    data = talks(tmp_path)
    whole = get_change("route-kv")(get("sft")(data, str(routed), lr=1e-2, **SMALL)).build(folder=tmp_path / "whole")
    assert whole.begun.model.config.stack.layers[4].mixer.borrow.p_borrow == 0.6
    whole.start()
    assert whole.result.name == "model" and orchard.load(whole.result).logits(IDS).isfinite().all()
    sides = get_change("route-kv")(get("lora")(data, str(routed), r=2, **SMALL)).build(folder=tmp_path / "sides")
    sides.start()
    model = orchard.load(routed)
    model.adapters.load(sides.result)  # made for the base as it is
    few = get_change("retain")(get("sft")(data, str(routed), lr=1e-2, **SMALL), share=0.4).build(
        folder=tmp_path / "few"
    )
    few.start()
    assert few.result.name == "model.orchard" and owners(orchard.load(few.result).config) == [None, 0, None, 2, 2]


def test_a_plan_routes_and_keeps_some(tmp_path: Path, routed: Path) -> None:
    plan = ["route-kv:p_borrow=0.5", "retain:layers=[0, 2],fit=false", "kv8"]
    _, foreseen = forecast(routed, plan, **PLAN)
    found = compress(routed, plan, tmp_path / "few.orchard", device="cpu", **PLAN)
    assert [one["step"] for one in found.to_dict()["steps"]] == plan
    facts = found.to_dict()
    assert facts["kv_bytes_per_token"] == foreseen.size.kv < 0.3 * facts["original_kv_bytes_per_token"]
    made = orchard.load(found.path)
    assert owners(made.config) == [None, 0, None, 2, 2] and made.generate("The number", max_tokens=4).usage.calls
    assert main(["respond", "--model", str(found.path), "--max-tokens", "2", "The number"]) == 0
    cut = orchard.load(routed, rewrite=read_plan("retain:every=5").steps[0].transform)
    assert owners(cut.config) == [None, 0, 0, 0, 0] and cut.generate("The number", max_tokens=4).usage.calls


def test_what_cannot_be_asked_is_said(tmp_path: Path, routed: Path) -> None:
    for words, message in (
        ("route-kv:p_borrow=2", "p_borrow is 2"),
        ("retain:layers=[1,2]", "first layer"),
        ("retain", "which layers"),
        ("retain:every=0", "every is 0"),
    ):
        with pytest.raises((ConfigError, UsageError), match=message):
            asked(tmp_path, words)
    with pytest.raises(UsageError, match="side paths belong"):
        get_change("retain")(get("lora")(talks(tmp_path), str(routed), **SMALL), every=2)
    with pytest.raises(BadPlan, match="which layers keep"):
        read_plan("retain:every=2,share=0.5")
    with pytest.raises(BadPlan, match="there is no layer 9"):
        forecast(routed, ["retain:layers=[0,9]"], **PLAN)
    assert read_plan("retain").steps[0].transform.every == 2  # type: ignore[union-attr]


def test_the_page_says_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "routing.md").read_text()
    for source in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(source, "docs/routing.md", "exec"), {"__name__": "docs"})  # noqa: S102
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    talks(tmp_path)
    trains = re.findall(r"^orchard (train .*)$", page, re.M)
    assert len(trains) == 3 and all(main([*command.split(), "--show"]) == 0 for command in trains)
    (plan,) = re.findall(r"^orchard compress smollm2 (.*) --tokens", page, re.M)
    assert read_plan(plan.split()).words == plan.split()
