"""Checkpoints whose tensors are not those of their config: refused by name, early and cheaply, or loaded whole."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.cli.main import main
from orchard.core.errors import BadFile, UnsupportedFormat
from orchard.models.language.decoder import Decoder
from orchard.nn.tensors import tensor_names, tensor_shapes
from orchard.session.model import tokenizer_of
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.gguf.arch import ROPE_FACTORS
from orchard.weights.load import load_decoder
from tests.fuzz.checkpoint_cases import Sample, make_samples, resized, write
from tests.weights.hostile import opened, refusal, sample

# Claims against what is there -----------------------------------------------------------------------------------------

CLAIMS: list[tuple[str, str, str, int, str]] = [
    ("gguf", "llama", "llama.block_count", 4000, "block_count is 4,000, but case.gguf holds tensors of 1 layers"),
    ("gguf", "llama", "llama.embedding_length", 10_000_000, "'token_embd.weight' has shape [48, 32]"),
    ("gguf", "llama", "llama.attention.key_length", 10_000_000, "attn_q.weight' has shape"),
    ("gguf", "llama", "llama.vocab_size", 10_000_000, "'token_embd.weight' has shape [48, 32]"),
    ("folder", "llama", "num_hidden_layers", 4000, "num_hidden_layers is 4,000, but case holds tensors of 1 layers"),
    ("folder", "llama", "num_hidden_layers", 5000, "num_hidden_layers is 5,000"),
    ("folder", "llama", "hidden_size", 10_000_000, "embed_tokens.weight' has shape [48, 32]"),
    ("folder", "llama", "intermediate_size", 10_000_000, "mlp.gate_proj.weight' has shape [64, 32]"),
    ("folder", "llama", "head_dim", 10_000_000, "self_attn.q_proj.weight' has shape [32, 32]"),
    ("folder", "mixtral", "num_local_experts", 10_000_000, "gate.weight' has shape [4, 32]"),
]


@pytest.mark.parametrize(("kind", "family", "key", "value", "message"), CLAIMS)
def test_claims_are_refused_before_anything_is_built(
    kind: str, family: str, key: str, value: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sample(kind, family)
    refusal(Sample(kind, {**model.config, key: -1}, model.tensors), tmp_path)  # loads what is loaded lazily
    model.config[key] = value

    def never(*_: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(Decoder, "__init__", never)
    path = write(model, tmp_path)
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with open_checkpoint(path) as checkpoint, pytest.raises(BadFile) as caught:
            load_decoder(checkpoint)
        took, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in caught.value.message
    assert took < 1 and peak < 4 << 20


def test_experts_are_counted_one_by_one(tmp_path: Path) -> None:
    """As many as the config says: a file with more of them holds another model."""
    model = sample("folder", "mixtral")
    extra = "model.layers.0.block_sparse_moe.experts.4.w1.weight"
    model.tensors[extra] = model.tensors[extra.replace("4", "3")]
    assert extra in refusal(model, tmp_path)
    del model.tensors[extra], model.tensors[extra.replace("4", "3")]
    assert "no tensor" in refusal(model, tmp_path) and "experts.3.w1" in refusal(model, tmp_path)


# Tensors ------------------------------------------------------------------------------------------------------------


def _drop(model: Sample, name: str) -> None:
    del model.tensors[name]


def _rename(model: Sample, name: str) -> None:
    model.tensors[name.replace("weight", "wait")] = model.tensors.pop(name)


def _turn(model: Sample, name: str) -> None:
    kind, shape, data = model.tensors[name]
    model.tensors[name] = resized(model, kind, shape[::-1], data)


def _flatten(model: Sample, name: str) -> None:
    kind, shape, data = model.tensors[name]
    model.tensors[name] = resized(model, kind, (math.prod(shape),), data)


def _count_with(model: Sample, name: str) -> None:
    _, shape, data = model.tensors[name]
    model.tensors[name] = resized(model, "I32", shape, data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop, "has no tensor {name!r}"),
        (_rename, "has no tensor {name!r}"),
        (_turn, "{name!r} has shape [32, 64], not [64, 32]"),
        (_flatten, "{name!r} has shape [2048], not [64, 32]"),
        (_count_with, "{name!r} holds whole numbers (I32)"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "name"), [("gguf", "blk.0.ffn_up.weight"), ("folder", "model.layers.0.mlp.up_proj.weight")]
)
def test_tensors_that_are_not_those_of_the_config(
    kind: str, name: str, damage: Callable[[Sample, str], None], words: str, tmp_path: Path
) -> None:
    model = sample(kind, "llama")
    damage(model, name)
    assert words.format(name=name) in refusal(model, tmp_path)


def test_types_that_are_not_read_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, type_, name in (("gguf", "IQ4_NL", "blk.0.ffn_up.weight"), ("folder", "Z9", "model.norm.weight")):
        model = sample(kind, "llama")
        _, shape, data = model.tensors[name]
        model.tensors[name] = resized(model, type_, shape, data)
        with monkeypatch.context() as patch:
            patch.setattr("orchard.weights.checkpoint.Checkpoint.read", None)
            message = refusal(model, tmp_path, UnsupportedFormat)
        assert name in message and type_ in message


def test_experts_of_different_types_load(tmp_path: Path) -> None:
    model = sample("folder", "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    _, shape, data = model.tensors[name]
    model.tensors[name] = resized(model, "F8_E4M3", shape, data)
    assert opened(model, tmp_path).stack.layers[0].mlp.gate.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_shapes_of_a_tree_are_those_of_the_model() -> None:
    """The check before building knows every tensor of every family, and its shape."""
    from orchard.models.zoo import families

    for model in make_samples():
        if model.kind == "folder":
            tree = families()[model.config["model_type"]].tree(model.config).complete()
            with torch.device("meta"):
                built = tree.build()
            real = {
                n: tuple(m.shape if n.endswith("weight") and hasattr(m, "shape") else getattr(m, a).shape)
                for n, (m, a) in tensor_names(built).items()
            }
            assert tensor_shapes(tree) == real


# What a file may hold besides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gguf", "blk.0.extra_output.weight"),  # looks like a head, at its end
        ("gguf", "output.weight.old"),
        ("gguf", "rotary_emb.inv_freq"),
        ("folder", "vision_tower.patches.weight"),  # a model that does not see
        ("folder", "model.layers.0.vision_tower.weight"),
        ("folder", "model.layers.0.lm_head.weight"),
        ("folder", ROPE_FACTORS),
        ("folder", "model.embed_tokens.weight\x1b[2J"),
    ],
)
def test_tensors_that_belong_to_no_part(kind: str, name: str, tmp_path: Path) -> None:
    model = sample(kind, "llama")
    model.tensors[name] = next(iter(model.tensors.values()))
    assert f"belong to no part of a llama model: {name!r}" in refusal(model, tmp_path)


def test_a_tied_model_may_repeat_its_embedding_and_nothing_else(tmp_path: Path) -> None:
    model = sample("folder", "llama", tie_word_embeddings=True)
    kind, shape, data = model.tensors["model.embed_tokens.weight"]
    model.tensors["lm_head.weight"] = (kind, shape, data)
    assert opened(model, tmp_path).head is None
    model.tensors["lm_head.weight"] = (kind, shape, data[:-4] + struct.pack("<f", 5.0))
    assert "'lm_head.weight' is not the embedding" in refusal(model, tmp_path)
    model.config["tie_word_embeddings"] = False
    assert opened(model, tmp_path).head is not None
    model.config["tie_word_embeddings"] = True
    model.tensors["lm_head.weight"] = (kind, shape[::-1], data)
    assert "'lm_head.weight' has shape" in refusal(model, tmp_path)


def test_what_is_computed_or_belongs_to_other_senses_is_left_alone(tmp_path: Path) -> None:
    model = sample("folder", "llama")
    model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (4,), bytes(16))
    opened(model, tmp_path)
    seeing = sample("folder", "gemma3")
    seeing.tensors["model.multi_modal_projector.weight"] = ("F32", (1,), bytes(4))
    opened(seeing, tmp_path)
    seeing.tensors["language_model.model.layers.0.vision_tower.weight"] = ("F32", (1,), bytes(4))
    assert "belong to no part" in refusal(seeing, tmp_path)


# Other doors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[2], "two", math.nan, 10**6, -5])
def test_hostile_tokenizers_are_typed_errors(value: Any, tmp_path: Path) -> None:
    model = sample("gguf", "llama")
    model.config["tokenizer.ggml.eos_token_id"] = value
    with open_checkpoint(write(model, tmp_path)) as checkpoint, pytest.raises(BadFile) as caught:
        tokenizer_of(checkpoint)
    assert caught.value.hint


@pytest.mark.parametrize("template", ["\ud800 half", [{"name": ["default"]}], [{"name": "default", "template": 3}], 7])
def test_show_survives_hostile_folders(
    template: Any, empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sample("folder", "llama")
    model.tensors["model.norm.weight"] = ("\x1b[2J", (32,), bytes(32))
    model.beside["tokenizer_config.json"]["chat_template"] = template
    path = write(model, tmp_path)
    for form in ([], ["--json"], ["--template"]):
        code = main(["show", str(path), *form])
        out, err = capsys.readouterr()
        assert "unexpected" not in err and "\x1b" not in out + err
        assert (code, err) == (0, "")
        out.encode()


@pytest.mark.parametrize("licence", [7, ["mit"], [1.0] * 2000, True])
def test_a_licence_that_is_no_text_is_none(
    licence: Any, empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sample("gguf", "llama")
    model.config["general.license"] = licence
    path = write(model, tmp_path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.licence is None
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["licence"] == ""
