"""`--with upcycle`: a dense base is trained as a mixture, and left as files that can be loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.core.errors import ConfigError, UsageError
from orchard.nn.moe import MoE
from orchard.recipes import get
from orchard.recipes.changes import get_change
from tests.recipes.small import SMALL, fresh, talks
from tests.tiny import tiny_gguf

IDS = [257, *b"user 3", 258]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("base") / "tiny.gguf"))


def upcycled(folder: Path, base: str, **settings: Any) -> Any:
    run = get("sft")(talks(folder), base, lr=1e-2, **SMALL)
    return get_change("upcycle")(run, **settings)


def test_a_run_begins_as_the_base_and_leaves_a_mixtral(tmp_path: Path, base: str) -> None:
    run = upcycled(tmp_path, base, experts=4, k=2).build(folder=tmp_path / "run")
    with torch.no_grad():
        begun = run.begun.model.eval()(torch.tensor([IDS]))[0]
    torch.testing.assert_close(begun, orchard.load(base, dtype="float32").logits(IDS)[0], atol=1e-4, rtol=1e-4)
    report = run.start()
    assert report.series["moe.balance"][0] > 0.9 and report.series["moe.z"][0] >= 0
    made = orchard.load(tmp_path / "run" / "model", dtype="float32")
    assert made.built.family.name == "mixtral" and len(made.built.decoder.config.find(MoE)) == 1
    with torch.no_grad():
        trained = run.begun.model.eval()(torch.tensor([IDS]))
    assert torch.equal(made.logits(IDS), trained) and not torch.equal(trained[0], begun)
    assert made.generate("user 3", max_tokens=4).ids


def test_what_no_folder_describes_is_left_as_one_file(tmp_path: Path, base: str) -> None:
    run = upcycled(tmp_path, base, experts=4, layers=[0], shared=0.5, noise=0.01, z=0.0).build(folder=tmp_path / "run")
    report = run.start()
    assert run.result.name == "model.orchard" and any("model.orchard" in note for note in report.notes)
    assert "moe.z" not in report.series
    made = orchard.load(run.result, dtype="float32")
    assert isinstance(made.built.decoder.stack.layers[0].mlp, MoE)
    again = upcycled(tmp_path, base, experts=4, layers=[0], shared=0.5, noise=0.01, z=0.0)
    assert again.build(folder=tmp_path / "run").start().created == report.created  # it is done


def test_runs_that_have_nothing_to_upcycle_are_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(UsageError, match="nothing to upcycle"):
        get_change("upcycle")(fresh(tmp_path))
    with pytest.raises(UsageError, match="side paths"):
        get_change("upcycle")(get("lora")(talks(tmp_path), base, **SMALL))
    with pytest.raises(ConfigError, match="experts"):
        upcycled(tmp_path, base, experts=4, k=5)
    with pytest.raises(ConfigError, match="adapter"):
        run = upcycled(tmp_path, base)
        run.clone(adapter=get("lora")(talks(tmp_path), base, **SMALL).adapter).complete()
