"""A draft model: some layers of a model between its own embedding, last norm and head, so that ids mean the same to both.

A model that loses most of its layers guesses badly until the rest has learnt to stand in for them (`orchard.recipes.draft`). The
first layer turns tokens into what all others read and the last makes what the norm before the head expects, so both are kept, and
what lies between is taken at even distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Plain
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.nn.tensors import dense_tensor, tensor_names
from orchard.transforms.lora import LoraLinear, merged

SHARE = 8
"""Of so many layers a draft has one, unless it is told otherwise."""


def draft_layers(count: int, layers: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Which layers of a model that has `count` a draft is made of: those that are named, or so many at even distances."""
    if layers is None:
        layers = max(1, round(count / SHARE))
    if isinstance(layers, int):
        if isinstance(layers, bool) or not 1 <= layers <= count:
            raise ConfigError(f"a draft of {layers} layers of a model that has {count}", hint=f"use 1 to {count}")
        if layers == 1:
            return (0,)
        return tuple(round(place * (count - 1) / (layers - 1)) for place in range(layers))
    chosen = tuple(layers)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= count:
        raise ConfigError(
            f"a draft of the layers {list(chosen)} of a model that has {count}",
            hint=f"name layers from 0 to {count - 1}, each once, in their order",
        )
    return chosen


def draft_config(base: Decoder.Config, layers: int | Sequence[int] | None = None) -> Decoder.Config:
    """The tree of the draft: dense weights, and only the layers that were chosen."""
    blocks = base.stack.layers
    chosen = draft_layers(len(blocks), layers)
    places = {layer: place for place, layer in enumerate(chosen)}
    taken = []
    for layer in chosen:
        block = blocks[layer].clone()
        store: Any = getattr(block.mixer, "store", None)
        if store is not None and store.owner is not None:
            if store.owner not in places:
                raise UnsupportedPair(
                    f"layer {layer} reads the keys and values of layer {store.owner}, which the draft would not have",
                    hint="name the layers of the draft so that it has both",
                )
            store.owner = places[store.owner]
        taken.append(block)
    tree = base.clone(stack=base.stack.clone(layers=taken))
    return _plain(tree).complete()


def draft_from(decoder: Decoder, layers: int | Sequence[int] | None = None) -> Decoder:
    """A smaller model with copies of some layers of a decoder, its embedding, its last norm and its head, in float32. Side paths
    of adapters are merged into the copies."""
    whole = without_sides(decoder)
    chosen = draft_layers(len(whole.config.stack.layers), layers)
    tree = draft_config(whole.config, chosen)
    with torch.device("meta"):
        made: Decoder = tree.build()
    made = made.to_empty(device="cpu")
    source = tensor_names(whole)
    with torch.no_grad():
        for name, (module, attribute) in tensor_names(made).items():
            from_module, from_attribute = source[_origin(name, chosen)]
            target: torch.Tensor = dense_tensor(module, attribute)
            target.copy_(dense_tensor(from_module, from_attribute, torch.float32))
    return made.eval()


def without_sides(decoder: Decoder) -> Decoder:
    """The same model with the side paths of adapters merged into its weights; other weights are shared."""
    return merged(decoder) if any(isinstance(module, LoraLinear) for module in decoder.modules()) else decoder


def describe_draft(hf_config: Mapping[str, Any], chosen: Sequence[int], count: int) -> dict[str, Any]:
    """The model's description in Hugging Face's words, for the draft: what is given layer by layer loses that of others."""
    facts: dict[str, Any] = {}
    for name, value in hf_config.items():
        by_layer = isinstance(value, list) and len(value) == count and name != "rope_scaling"
        facts[name] = [value[layer] for layer in chosen] if by_layer else value
    return {**facts, "num_hidden_layers": len(chosen)}


def freeze_ends(draft: Decoder) -> None:
    """Train the layers and the last norm; embedding and head stay the model's."""
    draft.requires_grad_(True)
    for part in (draft.embedding, draft.head):
        if isinstance(part, nn.Module):
            part.requires_grad_(False)


def _origin(name: str, chosen: Sequence[int]) -> str:
    if not name.startswith("stack.layers."):
        return name
    place, _, rest = name.removeprefix("stack.layers.").partition(".")
    return f"stack.layers.{chosen[int(place)]}.{rest}"


def _plain(tree: Decoder.Config) -> Decoder.Config:
    def dense(node: BaseConfig) -> BaseConfig:
        return node.clone(format=Plain.Config())

    for kind in (Linear, GroupedLinear, Embedding):
        if tree.find(kind):
            tree = tree.rewrite(kind, dense)
    return tree
