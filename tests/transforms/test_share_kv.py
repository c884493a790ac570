"""Shared keys and values, and keys and values in eight bits: what is dropped, what stays, what is counted, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchard.cache.codecs import Int8
from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, Rotary
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.transforms.kv8 import KV8
from orchard.transforms.qat import Qat
from orchard.transforms.share_kv import ShareKV, kv_bytes

IDS = torch.arange(9)[None] * 3 % 40


def tree(*mixers: Any, layers: int = 8) -> Any:
    plain = Attention.Config(heads=4, kv_heads=2, head_dim=8, q_norm=RMSNorm.Config(), k_norm=RMSNorm.Config())
    each = [
        Block.Config(mixer=mixer.clone(), mlp=GatedMLP.Config(hidden_dim=24)) for mixer in mixers or [plain] * layers
    ]
    return Decoder.Config(vocab=40, dim=16, context=32, stack=Stack.Config(layers=each), head=None)


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.eval()


def owners(cfg: Any) -> list[int | None]:
    return [node.store.owner for _, node in cfg.complete().find(Attention)]


def test_the_last_layers_read_the_last_own_one() -> None:
    assert owners(ShareKV(last=3)(tree())) == [None] * 5 + [4] * 3
    assert owners(ShareKV(share=0.375)(tree())) == [None] * 5 + [4] * 3
    assert ShareKV(share=0.375).count(30) == 11 and ShareKV(share=0.375).count(56) == 21
    again = ShareKV(last=5)(ShareKV(last=3)(tree()))
    assert owners(again) == [None] * 3 + [2] * 5
    assert owners(ShareKV(last=1)(tree(layers=2))) == [None, 0]
    assert ShareKV.heals and not ShareKV.learns


def test_bytes_are_counted_exactly() -> None:
    whole = kv_bytes(tree(), torch.bfloat16)
    assert whole == 8 * 2 * 2 * 8 * 2  # layers, keys and values, heads, width, bytes
    assert kv_bytes(ShareKV(last=3)(tree())) * 8 == whole * 5
    eight = KV8()(ShareKV(last=3)(tree()))
    assert kv_bytes(eight) == 5 * 2 * 2 * (8 + 4)
    smol = tree(*[Attention.Config(heads=9, kv_heads=3, head_dim=64)] * 30)
    assert kv_bytes(ShareKV(share=0.375)(smol)) * 30 == kv_bytes(smol) * 19
    model = built(KV8().apply(ShareKV(last=3).apply(built(tree()))).config)
    cache = model.cache(batch=1, length=10)  # with one spare slot
    assert cache.nbytes == 11 * kv_bytes(model.config, model.dtype)


def test_everything_else_stays_bit_for_bit() -> None:
    model = built(tree())
    model.norm.requires_grad_(False)
    made = ShareKV(last=3).apply(model)
    kept, before = made.state_dict(), model.state_dict()
    gone = {name for name in before if name not in kept}
    parts = ("k.weight", "v.weight", "k_norm.weight")
    assert gone == {f"stack.layers.{i}.mixer.{part}" for i in (5, 6, 7) for part in parts}
    assert all(torch.equal(value, before[name]) for name, value in kept.items())
    assert not {v.data_ptr() for v in kept.values()} & {v.data_ptr() for v in before.values()}
    learns = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert learns == kept.keys() - {"norm.weight"}
    with torch.no_grad():
        assert not torch.equal(made(IDS), model(IDS))
        cache = made.cache(batch=1, length=9)
        pieces = [
            made(IDS[:, at : at + 3], Context(torch.arange(at, at + 3)[None], cache=cache)) for at in range(0, 9, 3)
        ]
        assert torch.allclose(torch.cat(pieces, 1), made(IDS), atol=1e-4)


def test_packed_weights_go_along_code_for_code() -> None:
    qat = Qat(bits=2, group=8)
    packed = qat.finish(qat.apply(built(tree())))
    made = KV8().apply(ShareKV(last=2).apply(packed))
    assert torch.equal(made.stack.layers[7].mlp.up.codes, packed.stack.layers[7].mlp.up.codes)
    assert all(isinstance(store.codec, Int8.Config) for store in made.stores())
    assert made.stack.layers[7].mixer.k is None and not any(p.requires_grad for p in made.parameters())


def test_with_texts_what_attention_adds_comes_nearer_to_what_it_added_on_other_text_too() -> None:
    model = built(tree())
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, model.config.vocab, (8, 24), generator=draw) for _ in range(5)]
    other, texts = ids[-1], [whole_rows(rows) for rows in ids[:-1]]
    plain, fitted = ShareKV(last=3).apply(model), ShareKV(last=3).apply(model, texts)
    kept, before = fitted.state_dict(), model.state_dict()
    changed = {name for name in kept if not torch.equal(kept[name], before[name])}
    assert changed == {f"stack.layers.{layer}.mixer.o.weight" for layer in (5, 6, 7)}
    with torch.no_grad():
        was, unfit, fit = (decoder.hidden(other, context_of(other)) for decoder in (model, plain, fitted))
    assert (fit - was).square().sum() < 0.5 * (unfit - was).square().sum()


def test_refined_they_come_nearer_still_and_nothing_else_changes() -> None:
    model = built(tree())
    draw = torch.Generator().manual_seed(5)
    texts = [whole_rows(torch.randint(0, model.config.vocab, (8, 24), generator=draw)) for _ in range(4)]
    fitted, refined = ShareKV(last=3).apply(model, texts), ShareKV(last=3, refine=60).apply(model, texts)
    kept, before = refined.state_dict(), model.state_dict()
    changed = {name.rpartition(".mixer.")[0] for name in kept if not torch.equal(kept[name], before[name])}
    assert changed == {f"stack.layers.{layer}" for layer in (4, 5, 6, 7)}, "the layer that is read, and its readers"
    with torch.no_grad():
        was, fit, fine = (
            torch.cat([decoder.hidden(batch.ids, context_of(batch.ids)) for batch in texts])
            for decoder in (model, fitted, refined)
        )
    assert (fine - was).square().sum() < (fit - was).square().sum()
    with pytest.raises(ConfigError, match="refining"):
        ShareKV(last=3, refine=-1)


def test_maps_that_are_packed_are_left_and_named() -> None:
    qat = Qat(bits=2, group=8)
    packed = qat.finish(qat.apply(built(tree())))
    share = ShareKV(last=2)
    made = share.apply(packed, [whole_rows(IDS)])
    assert torch.equal(made.stack.layers[7].mixer.o.codes, packed.stack.layers[7].mixer.o.codes)
    assert [note.partition(":")[0] for note in share.notes] == ["layer 6", "layer 7"]


def whole_rows(ids: torch.Tensor) -> Batch:
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return Batch(ids=ids, targets=ids, positions=positions, documents=torch.zeros_like(ids))


def context_of(ids: torch.Tensor) -> Context:
    return Context(torch.arange(ids.shape[1]).expand(len(ids), -1))


def test_windows_are_read_by_windows() -> None:
    near = Attention.Config(heads=4, kv_heads=2, head_dim=8, window=4, rotary=Rotary.Config(theta=100.0))
    far = near.clone(window=None, rotary=Rotary.Config(theta=10000.0))
    gemma = tree(near, near, far, near, near, far)
    assert owners(ShareKV(last=3)(gemma)) == [None, None, None, 1, 1, 2]
    assert owners(ShareKV(last=2)(gemma)) == [None, None, None, None, 3, 2]
    with pytest.raises(UnsupportedPair, match="layer 2 sees everything, and none of the first 2"):
        ShareKV(last=4)(gemma)
    ShareKV(last=3).apply(built(gemma))(IDS)


def test_what_cannot_be_shared_is_said() -> None:
    for wrong in ({}, {"last": 3, "share": 0.5}, {"last": 0}, {"last": True}, {"share": 1.0}, {"share": float("nan")}):
        with pytest.raises(ConfigError):
            ShareKV(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="8 of 8 layers"):
        ShareKV(last=8)(tree())
    with pytest.raises(ConfigError, match="0 of 8 layers"):
        ShareKV(share=0.01)(tree())
    with pytest.raises(ConfigError, match="nothing to share"):
        ShareKV(last=1)(tree(layers=1))
    plain = Attention.Config(heads=4, kv_heads=2, head_dim=8)
    with pytest.raises(UnsupportedPair, match="layer 1 reads 4 key/value heads of 8, and layer 0 keeps 2 of 8"):
        ShareKV(last=1)(tree(plain, plain.clone(kv_heads=4)))
    with pytest.raises(UnsupportedPair, match="layers 0 and 1 turn keys"):
        ShareKV(last=1)(tree(plain, plain.clone(rotary=None)))
