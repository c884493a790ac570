"""The encoder beside transformers' BertModel on small random weights, the BERT config function and its key map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.config import Config
from orchard.core.context import Context
from orchard.core.errors import BadFile, OrchardError, UnsupportedFormat
from orchard.models.language.encoder import Encoder
from orchard.models.zoo import families
from orchard.models.zoo.bert import UNREAD, bert, hf_names
from orchard.weights.encoder import load_encoder, open_encoder
from tests.tiny_bert import CONFIG

SHAPES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "wide heads, tanh": {"num_attention_heads": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "one layer, relu, one type": {"num_hidden_layers": 1, "hidden_act": "relu", "type_vocab_size": 1},
}


def reference(path: Path, changes: dict[str, Any], kind: str = "BertModel") -> Any:
    """A random model of transformers, saved by transformers."""
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(**{**CONFIG, **changes, "initializer_range": 0.4})
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval().requires_grad_(False)
    for name, value in model.named_parameters():
        if name.endswith((".bias", "LayerNorm.weight")):  # they begin as zeros and ones, which would hide a mistake
            value.data.add_(torch.randn(value.shape) * 0.3)
    model.save_pretrained(path)
    return model


def loaded(path: Path) -> Encoder:
    with open_encoder(path) as opened:
        return load_encoder(opened)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_what_transformers_does(shape: str, tmp_path: Path) -> None:
    theirs, ours = reference(tmp_path / "m", SHAPES[shape]), loaded(tmp_path / "m")
    kinds = SHAPES[shape].get("type_vocab_size", 2)
    for lengths in ([1], [2], [40], [7, 7, 7], [40, 1, 13, 26], [3, 2, 1]):
        ids = torch.randint(CONFIG["vocab_size"], (len(lengths), max(lengths)))
        valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        types = torch.randint(kinds, ids.shape)
        want = theirs(ids, attention_mask=valid.long(), token_type_ids=types).last_hidden_state
        have = ours(ids, Context.whole(ids, valid), types)
        assert (want - have)[valid].abs().max() < 1e-5
        plain = theirs(ids, attention_mask=valid.long()).last_hidden_state
        mean = (plain * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        assert (ours.vectors(ids, valid) - torch.nn.functional.normalize(mean, dim=-1)).abs().max() < 1e-5
        looked_at = (want - plain)[valid].abs().max() > 0.01
        assert looked_at == bool(types[valid].any())  # the types count


def test_a_body_below_heads_and_the_names_of_the_first_release(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = reference(tmp_path / "m", {}, "BertForPreTraining")
    file = tmp_path / "m" / "model.safetensors"
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(file).items()
    }
    assert any(name.startswith("cls.") for name in renamed) and "bert.embeddings.LayerNorm.gamma" in renamed
    save_file(renamed, file)
    ids = torch.arange(12)[None]
    want = theirs.bert(ids).last_hidden_state
    assert (want - loaded(tmp_path / "m")(ids)).abs().max() < 1e-5


def test_the_tree_can_be_stored_and_is_as_large_as_it_says() -> None:
    tree = bert(CONFIG).complete()
    assert Config.from_dict(tree.to_dict()) == tree
    model: Encoder = tree.build()
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 32) and model.dtype == torch.float32
    assert "bert" not in families()  # those write


def test_a_config_that_leaves_things_out_is_bert_base() -> None:
    from transformers import BertConfig

    tree, base = bert({"model_type": "bert"}).complete(), BertConfig()
    assert (tree.vocab, tree.dim, tree.context) == (base.vocab_size, base.hidden_size, base.max_position_embeddings)
    assert len(tree.stack.layers) == base.num_hidden_layers and tree.kinds == base.type_vocab_size
    layer: Any = tree.stack.layers[0]
    assert (layer.mixer.heads, layer.mlp.hidden_dim) == (base.num_attention_heads, base.intermediate_size)
    assert layer.mlp.activation == "gelu" and layer.mlp_norm.eps == base.layer_norm_eps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "384"}, "hidden_size is '384'"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"num_hidden_layers": 10**6}, "no model has so many layers"),
        ({"layer_norm_eps": -1}, "layer_norm_eps"),
        ({"hidden_act": 3}, "hidden_act is 3"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
    ],
)
def test_numbers_that_make_no_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        bert({**CONFIG, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"hidden_act": "mish"},
        {"add_cross_attention": True},
    ],
)
def test_other_kinds_of_bert_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat, match=next(iter(changes))) as caught:
        bert({**CONFIG, **changes})
    assert caught.value.hint


def test_names() -> None:
    assert hf_names("stack.layers.11.mixer.o.bias")[0] == "encoder.layer.11.attention.output.dense.bias"
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in hf_names("stack.layers.0.mlp_norm.weight")
    with pytest.raises(KeyError):
        hf_names("head.weight")
    assert UNREAD.fullmatch("embeddings.position_ids") and UNREAD.fullmatch("bert.pooler.dense.bias")
    assert not UNREAD.fullmatch("encoder.layer.0.adapter.weight")
    assert issubclass(UnsupportedFormat, OrchardError)
