"""Small decoders with norms over keys, for tests of layers that read each other's keys and values."""

from __future__ import annotations

from typing import Any

import torch

from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

VOCAB = 40
IDS = torch.arange(22).view(2, 11) * 7 % VOCAB


def tree(*mixers: Any, layers: int = 4) -> Any:
    plain = Attention.Config(heads=4, kv_heads=2, head_dim=8, q_norm=RMSNorm.Config(), k_norm=RMSNorm.Config())
    each = [
        Block.Config(mixer=mixer.clone(), mlp=GatedMLP.Config(hidden_dim=24)) for mixer in mixers or [plain] * layers
    ]
    return Decoder.Config(vocab=VOCAB, dim=16, context=32, stack=Stack.Config(layers=each), head=None)


def built(cfg: Any) -> Decoder:
    """With weights large enough for everything to matter, and norms that differ from layer to layer."""
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def owners(cfg: Any) -> list[int | None]:
    return [node.store.owner for _, node in cfg.complete().find(Attention)]
