"""Shapes of models that are trained from nothing: Llama's, in a few sizes; and how Hugging Face would describe a tree.

Embeddings are tied to the head, and as large as the vocabulary makes them: 1m and 10m are counted without. 135m and 360m have the
shape of SmolLM2 (arXiv 2502.02737), 1b that of Llama 3.2 1B; they weigh as much with those models' vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchard.core.config import REQUIRED
from orchard.core.config_text import diff
from orchard.core.errors import ConfigError, OrchardError, UsageError
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, families
from orchard.recipes.base import nearest
from orchard.weights.export import shape_only


@dataclass(frozen=True)
class Shape:
    """What tells one size from another. Heads have 64 numbers, smaller models 32."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    theta: float = 10_000.0


SIZES = {
    "1m": Shape(dim=128, layers=5, heads=4, kv_heads=2, hidden=384),
    "10m": Shape(dim=320, layers=8, heads=5, kv_heads=5, hidden=896),
    "135m": Shape(dim=576, layers=30, heads=9, kv_heads=3, hidden=1536, theta=100_000.0),
    "360m": Shape(dim=960, layers=32, heads=15, kv_heads=5, hidden=2560, theta=100_000.0),
    "1b": Shape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, theta=500_000.0),
}


def llama(size: str, context: int, vocab: int | None = None) -> Decoder.Config:
    """A Llama-shaped model. `vocab` None: that of the run's tokenizer."""
    if size not in SIZES:
        raise UsageError(f"no size is called {size!r}", hint=nearest(size, SIZES))
    shape = SIZES[size]
    tree = families()["llama"].tree(
        {
            "model_type": "llama",
            "vocab_size": vocab or 1,
            "hidden_size": shape.dim,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.hidden,
            "max_position_embeddings": context,
            "rope_theta": shape.theta,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
    )
    return tree if vocab is not None else tree.clone(vocab=REQUIRED)


def words_of(tree: Decoder.Config) -> tuple[Family, dict[str, Any]]:
    """The family and the Hugging Face config of a tree; `ConfigError` names what no such config can say."""
    family = families()["llama"]
    try:
        words = _llama_words(tree)
        changes = diff(shape_only(family.tree(words).complete()), shape_only(tree.complete()))
    except (AttributeError, IndexError, OrchardError) as error:  # parts that Llama does not have
        raise ConfigError(
            f"no family of files has this model's parts: {error}", hint="train a Llama's shape"
        ) from error
    if changes:
        raise ConfigError(f"no family of files has this model's shape: {changes[0]}", hint="train a Llama's shape")
    return family, words


def _llama_words(tree: Any) -> dict[str, Any]:
    first = tree.stack.layers[0]
    mixer, mlp = first.mixer, first.mlp
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tree.vocab,
        "hidden_size": tree.dim,
        "num_hidden_layers": len(tree.stack.layers),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "intermediate_size": mlp.hidden_dim,
        "hidden_act": mlp.activation,
        "max_position_embeddings": tree.context,
        "rope_theta": mixer.rotary.theta,
        "rms_norm_eps": first.mixer_norm.eps,
        "attention_bias": mixer.q.bias,
        "mlp_bias": mlp.gate.bias,
        "tie_word_embeddings": tree.head is None,
    }
