"""An upcycled model as others read it: a Mixtral folder that transformers agrees with, and files that say the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.errors import ConfigError
from orchard.models.language import Decoder
from orchard.transforms.upcycle import Upcycle
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed import write_compressed
from orchard.weights.export import save_folder, save_gguf
from orchard.weights.load import load_decoder
from tests.parity.families import reference, save

IDS = torch.randint(3, 96, (2, 21), generator=torch.Generator().manual_seed(5))


def dense(case: str, folder: Path) -> tuple[Any, Decoder, Any]:
    theirs = reference(case)
    with open_checkpoint(save(theirs, folder)) as checkpoint:
        return theirs, load_decoder(checkpoint), checkpoint


@pytest.mark.parametrize("case", ["llama", "llama3-rope", "mistral", "mistral-global"])
@torch.inference_mode()
def test_a_folder_of_an_upcycled_model_is_a_mixtral(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs, model, checkpoint = dense(case, tmp_path / "dense")
    mixed = Upcycle(experts=4, k=2, noise=0.1).apply(model)
    save_folder(mixed, tmp_path / "mixed", family=checkpoint.family, hf_config=checkpoint.hf_config)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed")
    assert other.config.model_type == "mixtral"
    expected = other(input_ids=IDS, use_cache=False).logits
    assert (mixed(IDS) - expected).abs().max() <= 1e-4
    assert (theirs(input_ids=IDS, use_cache=False).logits - expected).abs().max() > 1e-3  # noise: it is another model
    with open_checkpoint(tmp_path / "mixed") as again:
        assert again.family.name == "mixtral"
        assert torch.equal(load_decoder(again)(IDS), mixed(IDS))


@torch.inference_mode()
def test_files_of_an_upcycled_model_say_the_same_again(tmp_path: Path) -> None:
    _, model, checkpoint = dense("llama", tmp_path / "dense")
    described: dict[str, Any] = {"family": checkpoint.family, "hf_config": checkpoint.hf_config}
    whole = Upcycle(experts=4, k=2, noise=0.1).apply(model)
    save_gguf(whole, tmp_path / "mixed.gguf", type="f32", **described)
    with open_checkpoint(tmp_path / "mixed.gguf") as again:
        assert torch.equal(load_decoder(again)(IDS), whole(IDS))
    partly = Upcycle(experts=4, k=2, layers="second", parts=2, shared=0.5, noise=0.1).apply(model)
    write_compressed(tmp_path / "mixed.orchard", partly, tokenizer_files={}, **described)
    with open_checkpoint(tmp_path / "mixed.orchard") as again:
        read = load_decoder(again)
    assert read.config == partly.config and torch.equal(read(IDS), partly(IDS))
    with pytest.raises(ConfigError, match="cannot describe"):  # no family has some layers of each, and a shared expert
        save_folder(partly, tmp_path / "partly", **described)
