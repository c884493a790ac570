"""Exports of tiny models of many families: there and back with equal scores and tokens, adapters merged or alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import ConfigError, UnsupportedFormat, UnsupportedPair, UsageError
from orchard.session.export import Exported, export
from orchard.session.parity_texts import TEXTS
from orchard.weights.adapters import OtherBase, read_adapter
from tests.session.export_models import ROWS, adapter_for, folder_of, opened
from tests.tiny import tiny_gguf

IDS = [3, 300, 41, 7, 512, 9, 77, 101]
FAMILIES = ("mistral", "llama3-rope", "qwen2", "gemma2-gguf", "gemma3", "mixtral", "qwen3-moe-all", "olmo2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("llama") / "source")


def scores(path: Path, ids: list[int] = IDS) -> np.ndarray:
    return opened(path).logits(ids)[0].numpy()


@pytest.mark.parametrize("case", FAMILIES)
def test_there_and_back_in_float32(case: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", case)
    there = export(source, tmp_path / "there.gguf", format="gguf", type="f32")
    back = export(tmp_path / "there.gguf", tmp_path / "back", format="hf", type="f32")
    for facts in (there, back):
        assert facts.parity.scaled_difference <= 1e-5 and facts.parity.same_choice == 1 and facts.texts > len(TEXTS)
    assert np.abs(scores(source) - scores(tmp_path / "back")).max() <= 1e-5
    ours, theirs = opened(source).tokenizer, opened(tmp_path / "back").tokenizer
    assert all(ours.encode(text) == theirs.encode(text) for text in TEXTS)
    assert ours.chat_template == theirs.chat_template and ours.eos_ids == theirs.eos_ids


def test_sentencepiece_models_too(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama", pieces=True)
    export(source, tmp_path / "there.gguf", format="gguf", type="f32")
    export(tmp_path / "there.gguf", tmp_path / "back", format="hf", type="f32")
    ours, theirs = opened(source).tokenizer, opened(tmp_path / "back").tokenizer
    assert all(ours.encode(text, bos=True) == theirs.encode(text, bos=True) for text in TEXTS)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_types_are_what_they_say_to_the_gguf_package(kind: str, llama: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    facts = export(llama, tmp_path / "x.gguf", format="gguf", type=kind)
    reader = GGUFReader(tmp_path / "x.gguf")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == kind and kinds["output_norm.weight"] == "f32"
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == ROWS
    assert reader.fields["general.file_type"].contents() == {"f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}[kind]
    assert facts.type == kind and facts.bytes == (tmp_path / "x.gguf").stat().st_size
    assert 0 < facts.parity.scaled_difference <= (facts.parity.limit or 0)


def test_what_gguf_cannot_say_of_a_model_is_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama-tied-biased")
    with pytest.raises(ConfigError, match=r"mlp\.gate\.bias"):
        export(source, tmp_path / "x.gguf", format="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_keeps_its_own_type_and_files(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", dtype="bfloat16")
    facts = export(source, tmp_path / "again", format="hf")
    assert facts.type == "bf16" and facts.parity.max_difference == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert export(source, tmp_path / "x.gguf", format="gguf").type == "f16"


def test_transformers_reads_what_came_from_gguf(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_gguf(tmp_path / "tiny.gguf")
    export(source, tmp_path / "folder", format="hf", type="f32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([IDS[:1]])).logits[0].numpy()
    assert np.abs(scores(source, IDS[:1]) - expected).max() <= 1e-4
    tokenizer, ours = AutoTokenizer.from_pretrained(tmp_path / "folder"), opened(source).tokenizer
    messages = [{"role": "user", "content": "Größe 12"}]
    assert tokenizer.encode("Größe 12", add_special_tokens=False) == ours.encode("Größe 12")
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>user\nGröße 12")


# Adapters -----------------------------------------------------------------------------------------------------------------


def by_hand(base: Path, adapters: list[Path]) -> dict[str, np.ndarray]:
    """Merged weights by the definition: W + scale · B · A, and DoRA's rows at their own length."""
    model = opened(base)
    weights = {name: value.detach().numpy().copy() for name, value in model.decoder.named_parameters()}
    for path in adapters:
        adapter = read_adapter(path, model.adapters.base, dora=True)
        for module, side in adapter.sides.items():
            weight = weights[f"{module}.weight"] + side.scale * (side.b @ side.a)
            if module in adapter.magnitudes:
                weight *= (adapter.magnitudes[module] / np.linalg.norm(weight, axis=1))[:, None]
            weights[f"{module}.weight"] = weight
    return weights


@pytest.mark.parametrize("kind", [{}, {"rslora": True, "rank": 5}, {"dora": True}])
@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_merged_weights_are_the_sum(kind: dict[str, Any], format: str, llama: Path, tmp_path: Path) -> None:
    adapter = adapter_for(llama, tmp_path / "one", **kind)
    target = tmp_path / ("m.gguf" if format == "gguf" else "m")
    facts = export(llama, target, format=format, type="f32", adapters=[adapter], merge=True)
    assert facts.adapters == ("one",) and facts.notes == ()
    expected = by_hand(llama, [adapter])
    for name, value in opened(target).decoder.named_parameters():
        np.testing.assert_allclose(value.detach().numpy(), expected[name], atol=2e-6, rtol=1e-5)
    assert np.abs(scores(target) - scores(llama)).max() > 0.05


def test_several_adapters_are_added_up(llama: Path, tmp_path: Path) -> None:
    adapters = [adapter_for(llama, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    export(llama, tmp_path / "m.gguf", format="gguf", type="f32", adapters=adapters, merge=True)
    expected = by_hand(llama, adapters)
    found = dict(opened(tmp_path / "m.gguf").decoder.named_parameters())
    name = "stack.layers.1.mixer.k.weight"  # whose rows GGUF keeps in another order
    np.testing.assert_allclose(found[name].detach().numpy(), expected[name], atol=2e-6)


def test_a_packed_base_is_unpacked_merged_and_packed_again(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "q.gguf", format="gguf", type="q8_0")
    adapter = adapter_for(tmp_path / "q.gguf", tmp_path / "one")
    again = {"adapters": [adapter], "merge": True}
    facts = export(tmp_path / "q.gguf", tmp_path / "m.gguf", format="gguf", type="q8_0", **again)
    assert facts.parity.worst_tensor_error < 0.01
    export(tmp_path / "q.gguf", tmp_path / "m", format="hf", type="f32", **again)
    assert np.abs(scores(tmp_path / "m") - scores(tmp_path / "m.gguf")).mean() < 0.05


def test_dora_is_applied_alone(llama: Path, tmp_path: Path) -> None:
    adapters = [adapter_for(llama, tmp_path / name, dora=name == "two") for name in ("one", "two")]
    with pytest.raises(UnsupportedPair, match="DoRA"):
        export(llama, tmp_path / "m", format="hf", adapters=adapters, merge=True)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("kind", [{}, {"rslora": True, "rank": 5}, {"dora": True}])
def test_an_adapter_alone_is_signed_with_its_base(kind: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    source = adapter_for(llama, tmp_path / "one", size=0.05, **kind)
    config = json.loads((source / "adapter_config.json").read_text())
    signed = config.pop("orchard_base")
    (source / "adapter_config.json").write_text(json.dumps(config))
    facts = export(llama, tmp_path / "two", format="peft", adapters=[source])
    assert facts.parity.max_difference == 0 and facts.texts == 0 and len(facts.notes) == 1
    assert json.loads((tmp_path / "two" / "adapter_config.json").read_text())["orchard_base"] == signed
    ours, theirs = (read_adapter(path, dora=True) for path in (source, tmp_path / "two"))
    assert ours.sides.keys() == theirs.sides.keys() and ours.magnitudes.keys() == theirs.magnitudes.keys()
    for path, side in ours.sides.items():
        assert np.array_equal(side.a, theirs.sides[path].a) and math.isclose(side.scale, theirs.sides[path].scale)
    small = export(llama, tmp_path / "three", format="peft", type="bf16", adapters=[source])
    assert small.parity.max_difference > 0 and small.bytes < facts.bytes


def test_an_adapters_biases_are_merged_and_copied(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    base = folder_of(tmp_path / "base", "llama-tied-biased")
    source = adapter_for(base, tmp_path / "one")
    weights = load_file(source / "adapter_model.safetensors")
    bias = np.random.default_rng(5).normal(size=64).astype(np.float32)
    weights["base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"] = bias
    save_file(weights, source / "adapter_model.safetensors")
    export(base, tmp_path / "alone", format="peft", adapters=[source])
    assert np.array_equal(read_adapter(tmp_path / "alone").biases["stack.layers.0.mixer.q"], bias)
    export(base, tmp_path / "m", format="hf", type="f32", adapters=[tmp_path / "alone"], merge=True)
    found = dict(opened(tmp_path / "m").decoder.named_parameters())["stack.layers.0.mixer.q.bias"]
    np.testing.assert_allclose(found.detach().numpy(), bias, atol=1e-6)


def test_an_adapter_of_another_base_is_refused(llama: Path, tmp_path: Path) -> None:
    other = folder_of(tmp_path / "other", "qwen2")
    with pytest.raises((OtherBase, UnsupportedFormat)):
        export(llama, tmp_path / "m", format="hf", adapters=[adapter_for(other, tmp_path / "one")], merge=True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"format": "onnx"}, "no format"),
        ({"format": "hf", "type": "q8_0"}, "cannot write hf as 'q8_0'"),
        ({"format": "peft", "adapters": ["a"], "type": "q4_0"}, "cannot write peft"),
        ({"format": "peft"}, "0 adapters"),
        ({"format": "peft", "adapters": ["a", "b"]}, "2 adapters"),
        ({"format": "peft", "adapters": ["a"], "merge": True}, "merged"),
        ({"format": "hf", "adapters": ["a"]}, "not to be merged"),
        ({"format": "hf", "merge": True}, "nothing to merge"),
        ({"format": "hf", "tolerance": -1.0}, "tolerance"),
        ({"format": "hf", "tolerance": float("nan")}, "tolerance"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        export(llama, tmp_path / "x", **asked)
    assert words in caught.value.message and caught.value.hint
    assert not list(tmp_path.iterdir())


def test_facts_are_plain_data(llama: Path, tmp_path: Path) -> None:
    facts: Exported = export(llama, tmp_path / "x.gguf", format="gguf", type="q4_0", tolerance=3.0)
    told = json.loads(json.dumps(facts.to_dict(), allow_nan=False))
    assert told["parity"]["raised"] is True and told["parity"]["limit"] == 3.0 and told["parity"]["kl"] > 0
    assert told["texts"] == facts.texts and told["path"] == str(tmp_path / "x.gguf")
