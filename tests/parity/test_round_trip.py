"""Weights survive every hop: folder → Orchard → folder, folder → Orchard → GGUF → Orchard → GGUF → transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.errors import ConfigError
from orchard.models.language import Decoder
from orchard.nn.linear import Linear
from orchard.nn.tensors import dense_tensor, tensor_names
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.export import copy_gguf, save_folder, save_gguf
from orchard.weights.load import load_decoder
from orchard.weights.safetensors import SafetensorsFile
from tests.parity.families import CASES, GGUF_CASES, reference, save

# Where transformers' GGUF reader understands the whole config. It drops head widths, query scales and rotary factors.
SAME_LOGITS = ("llama", "qwen2")
UNKNOWN_TO_THEM = ("mixtral", "olmo2", "olmoe")


def tensors(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: dense_tensor(module, attribute) for name, (module, attribute) in tensor_names(model).items()}


@pytest.mark.parametrize("case", sorted(CASES))
def test_folder_to_folder(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    save(theirs, tmp_path / "in")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        model = load_decoder(checkpoint)
        save_folder(model, tmp_path / "out", family=checkpoint.family, hf_config=checkpoint.hf_config)
    before, after = (SafetensorsFile.open(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert set(before.tensors) == set(after.tensors)
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)), name
    again = type(theirs).from_pretrained(tmp_path / "out")
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        assert torch.equal(
            again(input_ids=ids).logits, type(theirs).from_pretrained(tmp_path / "in")(input_ids=ids).logits
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_folder_is_lossless(dtype: torch.dtype, tmp_path: Path) -> None:
    save(reference("llama").to(dtype), tmp_path / "in")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        model = load_decoder(checkpoint)  # computed in float32, which holds both exactly
        save_folder(model, tmp_path / "out", family=checkpoint.family, hf_config=checkpoint.hf_config, dtype=dtype)
    before, after = (SafetensorsFile.open(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    for name in before.tensors:
        assert after.read(name).dtype == dtype
        assert torch.equal(before.read(name), after.read(name)), name


@pytest.fixture(scope="module", params=GGUF_CASES)
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Decoder, Path]:
    """A family's random model, as transformers' own, as ours, and as a GGUF file that we wrote."""
    folder = tmp_path_factory.mktemp(f"gguf-{request.param}")
    theirs = reference(request.param)
    save(theirs, folder / "in")
    with open_checkpoint(folder / "in") as checkpoint:
        model = load_decoder(checkpoint)
        path = folder / "model.gguf"
        save_gguf(model, path, family=checkpoint.family, hf_config=checkpoint.hf_config, type="f32")
    return request.param, theirs, model, path


def test_gguf_to_orchard_to_gguf(gguf: tuple[str, Any, Decoder, Path], tmp_path: Path) -> None:
    case, theirs, model, path = gguf
    with open_checkpoint(path) as checkpoint:
        again = load_decoder(checkpoint)
        save_gguf(again, tmp_path / "again.gguf", family=checkpoint.family, hf_config=checkpoint.hf_config, type="f32")
    first, second = tensors(model), tensors(again)
    assert first.keys() == second.keys()
    for name in first:
        if "gemma" in case and "norm" in name:  # stored with 1 added: exact up to that addition's rounding
            assert (first[name] - second[name]).abs().max() <= 1e-6
        else:
            assert torch.equal(first[name], second[name]), name
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (again(ids) - theirs(input_ids=ids).logits).abs().max() <= 1e-4
    with open_checkpoint(path) as before, open_checkpoint(tmp_path / "again.gguf") as after:
        assert before.source.metadata == after.source.metadata  # type: ignore[union-attr]
        for name in before.tensors:
            same = before.source.raw(name).tobytes() == after.source.raw(name).tobytes()  # type: ignore[union-attr]
            assert same or ("gemma" in case and "norm" in name), name


def test_gguf_in_transformers(gguf: tuple[str, Any, Decoder, Path]) -> None:
    """Their reader finds every tensor of our file, bit for bit; where it also reads the whole config, the same logits."""
    from transformers import AutoModelForCausalLM

    case, theirs, _, path = gguf
    if case in UNKNOWN_TO_THEM:
        _check_with_gguf_package(path)
        return
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    got, expected = read.state_dict(), theirs.state_dict()
    assert got.keys() == expected.keys()
    for name in expected:
        if "gemma" in case and "norm" in name:
            assert (got[name] - expected[name]).abs().max() <= 1e-6, name
        else:
            assert torch.equal(got[name], expected[name]), name
    if case in SAME_LOGITS:
        ids = torch.arange(3, 40)[None]
        with torch.inference_mode():
            assert (read(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() <= 1e-4


def _check_with_gguf_package(path: Path) -> None:
    """The format's own reader sees what ours sees."""
    from gguf import GGUFReader

    with open_checkpoint(path) as checkpoint:
        seen = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        assert seen.keys() == checkpoint.tensors.keys()
        for name, tensor in seen.items():
            ours = checkpoint.source.read(name)
            assert torch.equal(ours.flatten(), torch.from_numpy(tensor.data.copy()).flatten()), name


def test_copy_is_identical(gguf: tuple[str, Any, Decoder, Path], tmp_path: Path) -> None:
    *_, path = gguf
    with open_checkpoint(path) as checkpoint:
        copy_gguf(checkpoint, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
def test_packed_gguf_stays_close(type: str, tmp_path: Path) -> None:
    save(reference("llama"), tmp_path / "in")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        model = load_decoder(checkpoint)
        save_gguf(model, tmp_path / "m.gguf", family=checkpoint.family, hf_config=checkpoint.hf_config, type=type)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        again = load_decoder(checkpoint)
    bound = {"f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2, "q4_0": 0.15}[type]
    for name, tensor in tensors(model).items():
        scale = tensor.abs().max()
        assert (tensors(again)[name].float() - tensor).abs().max() <= bound * scale, name


@pytest.mark.parametrize(("case", "word"), [("gemma2", "scale"), ("qwen3-moe", "mlp")])
def test_what_gguf_cannot_say_is_refused(case: str, word: str, tmp_path: Path) -> None:
    save(reference(case), tmp_path / "in")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        model = load_decoder(checkpoint)
        with pytest.raises(ConfigError, match=word):
            save_gguf(model, tmp_path / "m.gguf", family=checkpoint.family, hf_config=checkpoint.hf_config, type="f32")
    assert not (tmp_path / "m.gguf").exists()


def test_a_rewritten_model_is_not_written_under_its_old_name(tmp_path: Path) -> None:
    save(reference("llama"), tmp_path / "in")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        tree = checkpoint.config().rewrite(Linear, lambda node: node.clone(bias=True), where="head")
        with torch.device("meta"):
            model = tree.build()
        with pytest.raises(ConfigError, match=r"head\.bias: False → True"):
            save_folder(model, tmp_path / "out", family=checkpoint.family, hf_config=checkpoint.hf_config)
    assert not (tmp_path / "out").exists()
