"""A Llama of transformers with random weights: the peer of benchmarks that compare programs and not checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from orchard.bench.shapes import Shape


def random_llama(shape: Shape, *, tied: bool = True, **more: Any) -> Any:
    """The same weights whenever it is called. `more` are further fields of transformers' LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        **more,
    )
    return LlamaForCausalLM(config)
