"""Folders of embedding models: what their small files mean, and what is refused when files are damaged or of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, ModelNotFound, OrchardError, UnknownArchitecture, UnsupportedFormat
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.encoder import load_encoder, open_encoder
from orchard.weights.sentence import MakesNoVectors, Sentence, WritesNoText, is_encoder
from tests.tiny import tiny_gguf
from tests.tiny_bert import CONFIG, TOKENS, tensors, tiny_bert

Tensors = dict[str, torch.Tensor]


def sentence(folder: Path) -> Sentence:
    with open_encoder(folder) as opened:
        return opened.sentence


def load(folder: Path) -> Any:
    with open_encoder(folder) as opened:
        return load_encoder(opened)


def test_what_the_files_say(tmp_path: Path) -> None:
    assert sentence(tiny_bert(tmp_path / "m")) == Sentence(32, TOKENS, "mean", False)
    bare = {"modules.json": None, "1_Pooling/config.json": None, "sentence_bert_config.json": None}
    assert sentence(tiny_bert(tmp_path / "bare", files=bare)) == Sentence(32, 40, "mean", False)
    long = {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 1e30}}
    assert sentence(tiny_bert(tmp_path / "long", files=long)).max_tokens == 40  # no more than there are places
    lower = {"sentence_bert_config.json": {"max_seq_length": 9000, "do_lower_case": True}}
    assert sentence(tiny_bert(tmp_path / "lower", files=lower)) == Sentence(32, 40, "mean", True)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, "max"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "first"),
    ],
)
def test_poolings(said: dict[str, Any], how: str, tmp_path: Path) -> None:
    model = load(tiny_bert(tmp_path / "m", files={"1_Pooling/config.json": said}))
    assert model.config.pooling.how == how


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "attention"},
        {"pooling_mode": [["mean"]]},
    ],
)
def test_other_poolings_are_refused(said: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="pooling by") as caught:
        sentence(tiny_bert(tmp_path / "m", files={"1_Pooling/config.json": said}))
    assert "mean, cls and max" in caught.value.hint


def steps(*kinds: str, path: str = "1_Pooling") -> list[dict[str, str]]:
    paths = {"Transformer": "", "Pooling": path}
    return [{"type": f"x.models.{kind}", "path": paths.get(kind, "2_Other")} for kind in kinds]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": steps("Transformer", "Pooling", "Dense", "Normalize")}, "Dense"),
        ({"modules.json": steps("Pooling", "Transformer")}, "Pooling, Transformer"),
        ({"modules.json": []}, "lists nothing"),
        ({"modules.json": {"a": 1}}, "not a list of modules"),
        ({"modules.json": b"[" * 100_000}, "not a list of modules"),
        ({"modules.json": b"\xff"}, "not UTF-8"),
        ({"modules.json": steps("Transformer", "Pooling", path="../../etc")}, "leads out of its folder"),
        ({"modules.json": steps("Transformer", "Pooling", path="gone")}, "lacks gone/config.json"),
        ({"1_Pooling/config.json": b"{"}, "not valid JSON"),
        ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length is 0"),
        ({"sentence_bert_config.json": {"max_seq_length": "256"}}, "max_seq_length is '256'"),
        ({"sentence_bert_config.json": {"do_lower_case": 1}}, "do_lower_case is 1"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "a prompt of its own"),
    ],
)
def test_small_files_that_are_damaged_or_ask_for_more(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=words) as caught:
        sentence(tiny_bert(tmp_path / "m", files=files))
    assert caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
STEP = st.fixed_dictionaries({}, optional={"type": JSON | st.sampled_from(["a.Transformer", "Pooling"]), "path": JSON})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("shared") / "m")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_small_files_hold_errors_are_typed(data: st.DataObject, shared: Path) -> None:
    file, content = data.draw(
        st.sampled_from(["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"]).flatmap(
            lambda name: st.tuples(
                st.just(name),
                JSON
                | st.lists(STEP, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["max_seq_length", "do_lower_case", "pooling_mode", "pooling_mode_cls_token"]), JSON
                ),
            )
        )
    )
    path = shared / file
    before = path.read_bytes()
    path.write_text(json.dumps(content))
    try:
        found = sentence(shared)
        assert 1 <= found.max_tokens <= 40 and found.pooling in ("mean", "first", "max")
    except OrchardError as error:
        assert error.hint
    finally:
        path.write_bytes(before)


# Tensors ----------------------------------------------------------------------------------------------------------------

QUERY = "encoder.layer.1.attention.self.query.weight"


def test_spare_tensors_are_left_where_they_are(tmp_path: Path) -> None:
    spare = {"embeddings.position_ids": torch.arange(40)[None], "pooler.dense.weight": torch.zeros(32, 32)}
    assert load(tiny_bert(tmp_path / "m", weights=tensors(CONFIG) | spare)).config.dim == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(QUERY), f"no tensor '{QUERY}'"),
        (lambda t: t.update({QUERY: torch.zeros(32, 31)}), "has shape"),
        (lambda t: t.update({QUERY: torch.zeros(32, 32, dtype=torch.int64)}), "whole numbers"),
        (lambda t: t.update({"encoder.layer.0.adapter.weight": torch.zeros(1)}), "belong to no part of a bert model"),
        (lambda t: t.update({"encoder.layer.2.output.dense.bias": torch.zeros(1)}), "holds tensors of 3 layers"),
    ],
)
def test_weights_that_are_not_those_of_the_config(change: Callable[[Tensors], Any], words: str, tmp_path: Path) -> None:
    weights = tensors(CONFIG)
    change(weights)
    with pytest.raises(BadFile, match=words) as caught:
        load(tiny_bert(tmp_path / "m", weights=weights))
    assert caught.value.hint


@pytest.mark.parametrize("cut", [0, 4, 100, 5000, -1])
def test_a_truncated_file(cut: int, tmp_path: Path) -> None:
    file = tiny_bert(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadFile):
        load(tmp_path / "m")


def test_pickled_and_packed_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedFormat, match="never loads pickle"):
        load(folder)
    packed = tiny_bert(tmp_path / "q", config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UnsupportedFormat, match="gptq"):
        load(packed)


# The other kind -----------------------------------------------------------------------------------------------------------


def test_an_encoder_does_not_write(tmp_path: Path) -> None:
    with pytest.raises(WritesNoText, match="minilm turns texts into vectors; it does not write") as caught:
        open_checkpoint(tiny_bert(tmp_path / "minilm"))
    assert caught.value.code == "embedding-model" and caught.value.exit_code == 2
    assert "orchard.embedder('minilm')" in caught.value.hint
    assert not is_encoder({"model_type": ["bert"]}) and not is_encoder({})


def test_a_model_that_writes_makes_no_vectors(tmp_path: Path) -> None:
    with pytest.raises(MakesNoVectors, match="smollm2 writes text") as caught:
        open_encoder(tiny_gguf(tmp_path / "model.gguf"), "smollm2")
    assert "orchard pull minilm" in caught.value.hint
    with pytest.raises(MakesNoVectors, match="m writes text"):
        open_encoder(tiny_bert(tmp_path / "m", config={"model_type": "llama"}, weights=tensors(CONFIG)))
    with pytest.raises(UnknownArchitecture, match="'roberta'") as unknown:
        open_encoder(tiny_bert(tmp_path / "r", config={"model_type": "roberta"}, weights=tensors(CONFIG)))
    assert "bert" in unknown.value.hint
    with pytest.raises(ModelNotFound):
        open_encoder(tmp_path / "nothing")
