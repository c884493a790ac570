"""A compressed file wherever a model goes: loaded, run natively, exported, adapted, with the draft that came with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.core.errors import ConfigError, UnsupportedFormat, UsageError
from orchard.generate.native import NativeRunner
from orchard.session.build import build, build_stored
from orchard.session.export import export
from orchard.session.prepare import packed_path, ready
from orchard.session.save import save_built
from orchard.session.shelf import installed
from orchard.transforms.lora import LoraLinear
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed import write_compressed
from orchard.weights.library import Library
from orchard.weights.parts import split
from tests.session.export_models import adapter_for, folder_of, opened
from tests.weights.compressed_models import built_with, family, same_tensors

IDS = [3, 30, 41, 7, 51, 9, 77, 101]
assert NativeRunner  # this file is skipped where there are no native kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("compressed") / "source")


def compressed(folder: Path, path: Path, changes: tuple[str, ...], seed: int = 0) -> Path:
    """A model of a folder's shape and words, with everything that `changes` name."""
    with open_checkpoint(folder) as checkpoint:
        hf = {**checkpoint.hf_config, "num_hidden_layers": 4}
    names = ("tokenizer.json", "tokenizer_config.json")
    files = {name: (folder / name).read_bytes() for name in names}
    model = built_with(changes, hf, seed)
    write_compressed(path, model, family=family(hf), hf_config=hf, tokenizer_files=files, made={"from": "tiny"})
    return path


@pytest.mark.parametrize("changes", [("formats",), ("formats", "sides", "shared", "kv8")])
def test_it_runs_natively_and_in_torch(
    changes: tuple[str, ...], folder: Path, empty_home: Path, tmp_path: Path
) -> None:
    path = compressed(folder, tmp_path / "small.orchard", changes)
    model = orchard.load(path)
    assert model.plan is not None and model.plan.whole
    with_torch = orchard.load(path, dtype="float32")
    assert with_torch.plan is None
    answer = model.generate("the cat", max_tokens=4)
    assert answer.usage.output == 4
    torch.testing.assert_close(model.logits(IDS), with_torch.logits(IDS))
    assert packed_path(path).name.startswith("small-") and packed_path(path).is_file()
    assert ready(path).path == packed_path(path)


def test_what_is_packed_from_it_is_not_much_larger(folder: Path, empty_home: Path, tmp_path: Path) -> None:
    """Also where weights are kept plain in bfloat16: they stay so."""
    with open_checkpoint(folder) as checkpoint:
        hf = {**checkpoint.hf_config, "hidden_size": 128, "intermediate_size": 512}
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    path = tmp_path / "small.orchard"
    model = built_with((), hf).bfloat16()
    size = write_compressed(path, model, family=family(hf), hf_config=hf, tokenizer_files=files)
    packed = ready(path).path
    assert packed is not None and packed.stat().st_size < 1.25 * size


def test_save_and_load_again(folder: Path, tmp_path: Path) -> None:
    tokenizer, built = build_stored(folder)
    path = tmp_path / "m.orchard"
    save_built(built, tokenizer, folder, path, None)
    again_tokenizer, again = build(path, None)
    same_tensors(built.decoder, again.decoder)
    assert again_tokenizer.encode("the cat") == tokenizer.encode("the cat")
    assert again_tokenizer.chat_template == tokenizer.chat_template and again_tokenizer.eos_ids == tokenizer.eos_ids
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.source.made["from"] == "source"  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="as 'f16'"):
        save_built(built, tokenizer, folder, tmp_path / "n.orchard", "f16")
    opened(folder).save(tmp_path / "o.orchard")
    assert (tmp_path / "o.orchard").read_bytes() == path.read_bytes()


# Export ---------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_repacked_code_for_code_and_back(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "m.gguf", format="gguf", type="q4_0")
    facts = export(tmp_path / "m.gguf", tmp_path / "m.orchard", format="orchard")
    assert facts.type == "stored" and facts.parity.max_difference == 0 and facts.parity.worst_tensor_error == 0
    same_tensors(build_stored(tmp_path / "m.gguf")[1].decoder, build(tmp_path / "m.orchard", None)[1].decoder)
    again = export(tmp_path / "m.orchard", tmp_path / "n.orchard", format="orchard")
    assert (tmp_path / "m.orchard").read_bytes() == (tmp_path / "n.orchard").read_bytes() and again.texts
    back = export(tmp_path / "m.orchard", tmp_path / "back", format="hf", type="f32")
    assert back.parity.same_choice == 1
    export(tmp_path / "m.orchard", tmp_path / "back.gguf", format="gguf", type="f32")
    ours, theirs = (opened(tmp_path / name).logits(IDS) for name in ("m.gguf", "back.gguf"))
    torch.testing.assert_close(ours, theirs)


def test_side_paths_are_merged_when_asked_and_refused_otherwise(folder: Path, tmp_path: Path) -> None:
    path = compressed(folder, tmp_path / "m.orchard", ("formats", "sides"))
    with pytest.raises(UsageError, match="28 side paths") as caught:
        export(path, tmp_path / "dense", format="hf", type="f32")
    assert "--merge" in caught.value.hint
    facts = export(path, tmp_path / "dense", format="hf", type="f32", merge=True)
    assert facts.parity.same_choice == 1
    torch.testing.assert_close(opened(path).logits(IDS), opened(tmp_path / "dense").logits(IDS), rtol=1e-4, atol=1e-4)
    kept = export(path, tmp_path / "n.orchard", format="orchard")
    assert kept.notes and (tmp_path / "n.orchard").read_bytes() == path.read_bytes()


def test_what_other_files_cannot_say_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shared = compressed(folder, tmp_path / "shared.orchard", ("shared", "formats"))
    for target, format in (("x.gguf", "gguf"), ("x", "hf")):
        with pytest.raises(UnsupportedFormat, match="2 layers, from 2 on, read the keys and values of layer 1"):
            export(shared, tmp_path / target, format=format)
    narrow = compressed(folder, tmp_path / "narrow.orchard", ("narrow",))
    with pytest.raises(ConfigError, match="hidden_dim"):
        export(narrow, tmp_path / "x", format="hf")
    whole = compressed(folder, tmp_path / "whole.orchard", ("formats",))
    with pytest.raises(UsageError, match="nothing to merge"):
        export(whole, tmp_path / "x", format="hf", merge=True)
    for wrong in ({"type": "f16"}, {"merge": True}):
        with pytest.raises(UsageError):
            export(whole, tmp_path / "x.orchard", format="orchard", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"x\.gguf for --format orchard"):
        export(whole, tmp_path / "x.gguf", format="orchard")
    assert not list(tmp_path.glob("x*"))


# Adapters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [("formats",), ("formats", "sides", "shared")])
def test_adapters_go_on_top(changes: tuple[str, ...], folder: Path, empty_home: Path, tmp_path: Path) -> None:
    path = compressed(folder, tmp_path / "m.orchard", changes)
    adapter = adapter_for(path, tmp_path / "adapter")
    native, in_torch = orchard.load(path), orchard.load(path, dtype="float32")
    assert native.adapters.base.signature == in_torch.adapters.base.signature
    for model in (native, in_torch):
        model.adapters.load(adapter)
    ours, theirs = (model.adapters.model(("adapter",)) for model in (native, in_torch))
    assert ours.plan is not None
    torch.testing.assert_close(ours.logits(IDS), theirs.logits(IDS))
    assert not torch.equal(ours.logits(IDS), native.logits(IDS))
    assert ours.generate("the cat", max_tokens=3).usage.output == 3
    if "shared" not in changes:
        facts = export(path, tmp_path / "merged", format="hf", type="f32", adapters=[adapter], merge=True)
        assert facts.parity.same_choice == 1
    with pytest.raises(UsageError, match="no adapters"):
        export(path, tmp_path / "x.orchard", format="orchard", adapters=[adapter], merge=True)


def test_merging_adds_adapters_to_side_paths_of_its_own(folder: Path, tmp_path: Path) -> None:
    path = compressed(folder, tmp_path / "m.orchard", ("formats", "sides"))
    adapter = adapter_for(path, tmp_path / "adapter")
    facts = export(path, tmp_path / "merged", format="hf", type="f32", adapters=[adapter], merge=True)
    assert facts.parity.same_choice == 1
    model = opened(path)
    assert isinstance(model.decoder.stack.layers[0].mixer.q, LoraLinear)
    model.adapters.load(adapter)
    both = model.adapters.model(("adapter",)).logits(IDS)
    torch.testing.assert_close(both, opened(tmp_path / "merged").logits(IDS), rtol=1e-3, atol=1e-3)


# A draft that came along ----------------------------------------------------------------------------------------------


@pytest.fixture
def mix(folder: Path, empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights folder with a model called mix, and a draft for it."""
    big = compressed(folder, tmp_path / "big.orchard", ("formats", "sides", "shared", "kv8"))
    small = compressed(folder, tmp_path / "small.orchard", ("formats",), seed=1)
    split(big, tmp_path / "weights", "mix", draft=small, licence="mit", source="test", part_bytes=50_000)
    monkeypatch.setenv("ORCHARD_WEIGHTS", str(tmp_path / "weights"))
    return big


def test_a_model_uses_the_draft_that_came_with_it(mix: Path) -> None:
    model = orchard.load("mix")
    assert model.draft is not None and model.draft.source == Library().models / "mix" / "draft.orchard"
    assert model.draft.draft is None
    alone = orchard.load("mix", draft=False)
    assert alone.draft is None and orchard.load("mix", draft="none").draft is None
    assert orchard.load(mix).draft is None  # the same file elsewhere came with none
    other = orchard.load("mix", draft=mix)
    assert other.draft is not None and other.draft.source == mix
    options: Any = {"max_tokens": 12}
    assert model.generate("the cat", **options).text == alone.generate("the cat", **options).text
    sampled = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    assert model.generate("one two", **sampled).text == alone.generate("one two", **sampled).text


def test_the_command_line_takes_it_by_name(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from orchard.cli.main import main

    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["draft"]) for row in listed["available"]] == [("mix", "draft.orchard")]
    assert installed() == ["mix"]
    assert main(["list"]) == 0
    assert "available" in capsys.readouterr().out
    assert main(["respond", "-m", "mix", "the cat", "--max-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert main(["respond", "-m", "mix", "the cat", "--max-tokens", "3", "--draft", "none"]) == 0
    assert capsys.readouterr().out == said
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (row,) = listed["models"]
    assert listed["available"] == [] and row["family"] == "llama" and "Int2" in row["quantisation"]
    assert main(["show", "mix", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    size = mix.stat().st_size
    assert facts["bytes"] == size == sum(part["bytes"] for part in facts["compressed"]["parts"])
    assert facts["source"] == "weights:mix" and facts["licence"] == "mit" and facts["layers"] == 4
    assert main(["show", "mix"]) == 0
    shown = capsys.readouterr().out
    assert f"{size:,}" in shown and "bits per weight" in shown and "keys and values per token" in shown
    for flag, word in (("--config", "Int2"), ("--plan", "layer"), ("--template", "im_start")):
        assert main(["show", "mix", flag]) == 0
        assert word in capsys.readouterr().out
    assert main(["rm", "mix", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packed_bytes"] > 0  # of the model and of its draft
    assert Library().find("mix") is None and not list((Library().home / "packed").glob("*.orchard"))
    assert main(["export", "mix", "--to", str(mix.with_name("y.orchard")), "--format", "orchard", "--json"]) == 0
    assert mix.with_name("y.orchard").read_bytes() == mix.read_bytes()
