"""A model with tracks from its recipe to its answers: trained, written, read again, packed, refused where files have no words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.cli.main import main
from orchard.core.errors import BadFile, ConfigError, UnsupportedFormat, UsageError
from orchard.models.zoo import families
from orchard.models.zoo.tracks import NAME
from orchard.nn.attention import RAttention
from orchard.nn.moe import MoE
from orchard.nn.norm import RMSNorm
from orchard.nn.tracks import Tracks
from orchard.recipes import Run, get
from orchard.recipes.changes import get_change
from orchard.recipes.shapes import llama, words_of
from orchard.transforms.local_global import LocalGlobal
from orchard.transforms.tracks import ParallelTracks
from tests.recipes.small import SMALL, talks, texts
from tests.tiny import tiny_gguf


def asked(folder: Path, **arguments: Any) -> Run.Config:
    """A run as `--with tracks:… --with local-global:…` asks for it, with four narrow layers."""
    cfg = get("pretrain")(texts(folder), size="1m", split="blank", lr=1e-2, **SMALL)
    tree: Any = cfg.train.model
    tree.stack.layers = tree.stack.layers[:4]
    for layer in tree.stack.layers:
        layer.mlp.hidden_dim = 32
    cfg = get_change("tracks")(cfg, count=2, depth=2)
    return get_change("local-global")(cfg, window=8, **arguments)


@pytest.mark.parametrize("mixer", ["attention", "rattention"])
def test_pretrained_written_read_and_asked(mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = asked(tmp_path, mixer=mixer).build(folder=tmp_path / "run")
    report = run.start()
    assert f"the model is in {run.result}" in report.notes
    facts = json.loads((run.result / "config.json").read_text())
    assert facts["model_type"] == NAME and (facts["num_tracks"], facts["track_depth"]) == (2, 2)
    ids = [256, *b"The number 3"]
    with torch.no_grad():
        wanted = run.begun.model.eval()(torch.tensor([ids]))
    model = orchard.load(run.result, dtype="float32")
    assert torch.equal(model.logits(ids), wanted)
    assert isinstance(model.config.stack.layers[0], Tracks.Config)
    assert (
        (facts.get("sliding_mixer") == "rattention") is bool(model.config.find(RAttention)) is (mixer == "rattention")
    )
    assert main(["show", str(run.result)]) == 0
    assert "2 of width 128, each 2 tracks of 2 layers" in capsys.readouterr().out
    answers = [model.generate("The number 3", max_tokens=8, seed=1).ids]
    small = tmp_path / "small.orchard"
    model.save(small)
    again = orchard.load(small, dtype="float32")
    assert torch.equal(again.logits(ids), wanted)
    answers.append(again.generate("The number 3", max_tokens=8, seed=1).ids)
    assert answers[0] == answers[1]
    with pytest.raises(UnsupportedFormat, match="GGUF has no words"):
        model.save(tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()


def test_words_say_everything_or_say_what_they_cannot() -> None:
    plain = llama("1m", 64, vocab=40)
    heads = plain.set("stack.layers", [layer.clone() for layer in plain.stack.layers[:4]])
    mixed = heads.clone()
    for layer in mixed.stack.layers[1::2]:
        layer.mlp = MoE.Config(hidden_dim=64, experts=4)  # type: ignore[misc]
    normed: Any = mixed.clone()
    for layer in normed.stack.layers:
        layer.mixer.q_norm = layer.mixer.k_norm = RMSNorm.Config(eps=1e-5)
    tracks, near, sums = (
        ParallelTracks(tracks=2, depth=2),
        LocalGlobal(window=8),
        LocalGlobal(window=8, mixer="rattention"),
    )
    for tree in (
        tracks(heads),
        near(heads),
        near(tracks(mixed)),
        near(tracks(normed)),
        sums(heads),
        sums(tracks(mixed)),
    ):
        family, words = words_of(tree.complete())
        assert family.name == NAME
        assert json.loads(json.dumps(words)) == words
    odd: Any = tracks(heads)
    odd.stack.layers[0].tracks[1].layers[0].mlp.activation = "relu"
    with pytest.raises(ConfigError, match="no family of files has this model's shape"):
        words_of(odd.complete())


def test_a_config_from_outside_is_held_to_what_a_model_can_be() -> None:
    family = families()[NAME]
    _, words = words_of(ParallelTracks(tracks=2, depth=5)(llama("1m", 64, vocab=40)))
    assert len(family.tree(words).complete().stack.layers) == 1
    for field, value in (
        ("num_tracks", 0),
        ("num_tracks", 10**6),
        ("track_depth", None),
        ("track_depth", 4096),
        ("track_combine", "max"),
        ("layer_types", ["full_attention"]),
        ("expert_layers", [1]),
        ("rope_on_full_attention", "no"),
        ("sliding_mixer", "linear"),
    ):
        with pytest.raises(BadFile):
            family.tree({**words, field: value})


def test_shapes_are_for_fresh_models(tmp_path: Path) -> None:
    base = str(tiny_gguf(tmp_path / "tiny.gguf"))
    cfg = get("sft")(talks(tmp_path), base, **SMALL)
    for name in ("tracks", "local-global"):
        with pytest.raises(UsageError, match="there already"):
            get_change(name)(cfg)


def test_the_page_says_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tracks.md").read_text()
    variables: dict[str, Any] = {"__name__": "docs"}
    for source in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(source, "docs/tracks.md", "exec"), variables)  # noqa: S102
    with pytest.raises(UsageError, match="belongs to no group"):
        variables["share_out"](variables["model"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (command,) = re.findall(r"^orchard (train .*)$", page, re.M)
    assert main([*command.split(), "--show"]) == 0
