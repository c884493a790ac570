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
from orchard.models.zoo.parts import FULL, SLIDING
from orchard.models.zoo.tracks import NAME as TRACKS
from orchard.nn.attention import Attention, RAttention
from orchard.nn.moe import MoE
from orchard.nn.tracks import Tracks
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
    own = any(isinstance(layer, Tracks.Config) or _no_llama(layer) for layer in tree.stack.layers)
    family = families()[TRACKS if own else "llama"]
    try:
        words = tracks_words(tree) if own else _llama_words(tree)
        changes = diff(shape_only(family.tree(words).complete()), shape_only(tree.complete()))
    except (AttributeError, IndexError, OrchardError) as error:  # parts that the family does not have
        raise ConfigError(
            f"no family of files has this model's parts: {error}", hint="train a Llama's shape, in tracks or not"
        ) from error
    if changes:
        raise ConfigError(
            f"no family of files has this model's shape: {changes[0]}", hint="train a Llama's shape, in tracks or not"
        )
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


def tracks_words(tree: Any) -> dict[str, Any]:
    """The words of the family for tracks; whoever reads them compares what they make with the tree."""
    first = tree.stack.layers[0]
    meets = isinstance(first, Tracks.Config)
    layers = [one for each in tree.stack.layers for one in (each.tracks[0].layers if meets else [each])]
    mixers, mlps = [block.mixer for block in layers], [block.mlp for block in layers]
    local, whole = ([one for one in mixers if (one.window is None) is every] for every in (False, True))
    turned = [one.rotary for one in mixers if one.rotary is not None]
    experts = [place for place, each in enumerate(mlps) if isinstance(each, MoE.Config)]
    dense = [each for each in mlps if not isinstance(each, MoE.Config)]
    words: dict[str, Any] = {
        "architectures": ["ParallelTracksForCausalLM"],
        "model_type": TRACKS,
        "vocab_size": tree.vocab,
        "hidden_size": tree.dim,
        "num_hidden_layers": len(tree.stack.layers),
        "num_attention_heads": mixers[0].heads,
        "num_key_value_heads": mixers[0].kv_heads,
        "head_dim": mixers[0].head_dim,
        "hidden_act": mlps[0].activation,
        "max_position_embeddings": tree.context,
        "rms_norm_eps": layers[0].mixer_norm.eps,
        "use_qk_norm": mixers[0].q_norm is not None,
        "layer_types": [FULL if one.window is None else SLIDING for one in mixers],
        "rope_on_full_attention": not whole or whole[0].rotary is not None,
        "tie_word_embeddings": tree.head is None,
    }
    if meets:
        words |= {"num_tracks": len(first.tracks), "track_depth": len(first.tracks[0].layers)}
        words["track_combine"] = first.combine
    if turned:
        words["rope_theta"] = turned[0].theta
    if local:
        words["sliding_window"] = local[0].window
        if isinstance(local[0], RAttention.Config):
            words["sliding_mixer"] = "rattention"
    if dense:
        words["intermediate_size"] = dense[0].hidden_dim
    if experts:
        mixture = mlps[experts[0]]
        words |= {
            "expert_layers": experts,
            "num_experts": mixture.experts,
            "num_experts_per_tok": mixture.router.k,
            "moe_intermediate_size": mixture.hidden_dim,
            "norm_topk_prob": mixture.router.renormalize,
        }
    return words


def _no_llama(layer: Any) -> bool:
    """Whether a layer is one that Llama has no words for, and we have: global without positions, or RATTENTION."""
    mixer = layer.mixer
    return isinstance(mixer, RAttention.Config) or (isinstance(mixer, Attention.Config) and mixer.rotary is None)
