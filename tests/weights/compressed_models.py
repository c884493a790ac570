"""Tiny models with everything that a compression may do to a tree, to be written as compressed files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from orchard.cache.codecs import Int8 as Codec8
from orchard.cache.store import Store
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, families
from orchard.nn.attention import Attention
from orchard.nn.formats import Blocks, Int2, Int4, Int8, Palette
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.nn.mlp import GatedMLP
from orchard.transforms.lora import Lora
from orchard.weights.compressed import write_compressed
from tests.tiny import tiny_tokenizer_files

VOCAB = 96
HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CHANGES = ("formats", "wide", "tables", "sides", "dora", "shared", "kv8", "narrow")
MADE = {"from": "a tiny model", "licence": "mit", "plan": ["formats"]}


def family(hf: dict[str, Any] = HF) -> Family:
    return families()[hf["model_type"]]


def tree_with(changes: Iterable[str], hf: dict[str, Any] = HF) -> Decoder.Config:
    """A family's tree with formats of every kind, side paths, shared or coded stores, narrower layers."""
    tree: Any = family(hf).tree(hf).complete()
    if "formats" in changes:
        kinds = {
            "q": Int2.Config(group=32),
            "k": Int4.Config(group=32, minimum=True),
            "o": Int8.Config(half=True),
            "gate": Int8.Config(group=32, half=True),
            "down": Int2.Config(group=32),
        }
        for kind in (Linear, GroupedLinear):
            for path, _ in tree.find(kind):
                if (name := path.rpartition(".")[2]) in kinds:
                    tree = tree.set(f"{path}.format", kinds[name])
        tree = tree.rewrite(Embedding, lambda node: node.clone(format=Int4.Config(group=32)))
    if "wide" in changes:  # scales in float32, which have no native form
        tree = tree.rewrite(Linear, lambda node: node.clone(format=Int8.Config()), "*.mixer.v")
    if "tables" in changes:
        palettes = {"v": Palette.Config(bits=4), "up": Palette.Config(bits=2), "o": Blocks.Config()}
        for path, _ in tree.find(Linear):
            if (name := path.rpartition(".")[2]) in palettes:
                tree = tree.set(f"{path}.format", palettes[name])
    if "shared" in changes:
        last = len(tree.stack.layers) - 1
        tree = tree.rewrite(
            Attention,
            lambda node: node.clone(store=node.store.clone(owner=1)) if node.layer >= 2 and last else node,
        )
    if "kv8" in changes:
        tree = tree.rewrite(Store, lambda node: node.clone(codec=Codec8.Config()))
    if "narrow" in changes:
        tree = tree.rewrite(GatedMLP, lambda node: node.clone(hidden_dim=64))
    if "sides" in changes:
        tree = Lora(r=4, alpha=8.0, dora="dora" in changes)(tree.complete())
    done: Decoder.Config = tree.complete()
    return done


def built_with(changes: Iterable[str] = (), hf: dict[str, Any] = HF, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model: Decoder = tree_with(changes, hf).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):  # begins as zeros, and would hide a side path that is lost
                parameter.normal_(std=0.2)
            if "lora_" in name and parameter.dim() > 1:
                parameter.copy_(parameter.half().float())
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(False)


def written(path: Path, model: Decoder, hf: dict[str, Any] = HF, **more: Any) -> Path:
    files = tiny_tokenizer_files(hf["vocab_size"])
    write_compressed(path, model, family=family(hf), hf_config=hf, **{"tokenizer_files": files, "made": MADE, **more})
    return path


def same_tensors(one: Decoder, other: Decoder) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
