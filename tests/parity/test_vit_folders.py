"""A ViT from a Hugging Face folder gives the scores that transformers gives, and folders that belie their config are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orchard.core.errors import BadFile, UnknownArchitecture, UnsupportedFormat
from orchard.weights.vision import load_vit


def folder(path: Path, **changes: Any) -> Any:
    """A small ViT of transformers, saved; every tensor is random, so that none can be left out unseen."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**shape, image_size=12, patch_size=4, num_labels=5, **changes)
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-6}])
@torch.no_grad()
def test_scores_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = folder(tmp_path, **changes)
    ours = load_vit(tmp_path)
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    wanted = theirs(images).logits
    assert wanted.std() > 0.1 and torch.allclose(ours(images), wanted, atol=1e-5)


def config_with(path: Path, **changes: Any) -> None:
    place = path / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": "swin"}, UnknownArchitecture, "unknown architecture 'swin'"),
        ({"patch_size": 5}, BadFile, "image_size is 12, which 5 does not divide"),
        ({"num_attention_heads": 3}, BadFile, "hidden_size is 16"),
        ({"num_hidden_layers": 3}, BadFile, "has no tensor"),
        ({"num_hidden_layers": 1}, BadFile, "belong to no part of a ViT"),
        ({"num_hidden_layers": 10**6}, BadFile, "no model has so many layers"),
        ({"image_size": 8}, BadFile, "has shape"),
        ({"hidden_act": "quick"}, UnsupportedFormat, "hidden_act is 'quick'"),
        ({"id2label": [1]}, BadFile, "id2label"),
    ],
)
def test_folders_that_belie_their_config_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    folder(tmp_path)
    config_with(tmp_path, **changes)
    with pytest.raises(error, match=said):
        load_vit(tmp_path)
