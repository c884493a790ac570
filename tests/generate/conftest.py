"""A tiny random decoder and a real byte-level tokenizer of the same vocabulary, and a model that is watched at work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.store import Cache, Store
from orchard.core.context import Context
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.text.loaded import Loaded
from orchard.text.spelling import byte_of_character
from orchard.text.tokenizer import Tokenizer

EOS = "<|end|>"
MERGES = ["t h", "th e", "a b", "a n", "an d"]


def make_decoder(
    vocab: int, *, context: int = 64, stores: Sequence[Callable[[], Store.Config]] = (Store.Config,) * 3, seed: int = 1
) -> Decoder:
    """One layer per store. Weights are larger than at the start of training, so that every token matters to the next."""
    torch.manual_seed(seed)
    layers = [
        Block.Config(
            mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8, store=store()),
            mlp=GatedMLP.Config(hidden_dim=64),
        )
        for store in stores
    ]
    model = Decoder.Config(vocab=vocab, dim=32, context=context, stack=Stack.Config(layers=layers)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


class Watched:
    """A model that notes what is asked of it."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.config = model.config
        self.device = model.device
        self.chunks: list[tuple[int, int]] = []
        self.views: list[int] = []
        self.scored: list[tuple[int, ...]] = []
        self.caches: list[weakref.ref[Cache]] = []
        self.lengths: list[int] = []
        self.on_hidden: Callable[[], object] = lambda: None

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        out = self.model.hidden(ids, context)
        self.chunks.append((ids.shape[0], ids.shape[1]))
        self.views.append(max(view.k.shape[2] for view in context.views.values()))
        self.on_hidden()
        return out

    def scores(self, hidden: Tensor) -> Tensor:
        self.scored.append(tuple(hidden.shape))
        return self.model.scores(hidden)

    def cache(self, *, batch: int, length: int) -> Cache:
        cache = self.model.cache(batch=batch, length=length)
        self.caches.append(weakref.ref(cache))
        self.lengths.append(length)
        return cache


def make_tokenizer() -> Tokenizer:
    """Every byte, five longer tokens, and one end token, which the decoder below would hardly ever choose."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    characters = sorted(byte_of_character(), key=byte_of_character().__getitem__)
    entries = [*characters, *(merge.replace(" ", "") for merge in MERGES)]
    vocab = {entry: place for place, entry in enumerate(entries)}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(merge.split()) for merge in MERGES]))  # type: ignore[misc]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    end = backend.token_to_id(EOS)
    assert end is not None
    return Tokenizer(
        Loaded(
            backend=backend,
            vocab_size=backend.get_vocab_size(with_added_tokens=True),
            control_ids=frozenset({end}),
            bos_id=None,
            eos_id=end,
            eos_ids=frozenset({end}),
            add_bos=False,
            chat_template=None,
        )
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def decoder(tokenizer: Tokenizer) -> Callable[..., Decoder]:
    def make(**options: Any) -> Decoder:
        return make_decoder(tokenizer.vocab_size, **options)

    return make


@pytest.fixture(scope="session")
def watched(decoder: Callable[..., Decoder]) -> Callable[..., Watched]:
    def make(**options: Any) -> Watched:
        return Watched(decoder(**options))

    return make


class Scripted:
    """A model that wants to say one given sequence of ids, whatever the prompt."""

    def __init__(self, script: Sequence[int], vocab: int, context: int = 256) -> None:
        self.script = script
        self.config = type("Shape", (), {"vocab": vocab, "context": context})()
        self.device = torch.device("cpu")
        self.said = 0

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        return torch.zeros(*ids.shape, 1)

    def scores(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(hidden.shape[0], self.config.vocab)
        out[:, self.script[min(self.said, len(self.script) - 1)]] = 50.0
        self.said += 1
        return out

    def cache(self, *, batch: int, length: int) -> Any:
        return type("Stores", (), {"keep": lambda self, rows: None})()


@pytest.fixture(scope="session")
def scripted(tokenizer: Tokenizer) -> Callable[..., Scripted]:
    def make(script: Sequence[int], **options: Any) -> Scripted:
        return Scripted(script, tokenizer.vocab_size, **options)

    return make
