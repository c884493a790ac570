"""Keys and values coded by what is fitted to a model: the file, whose it is, what the model says then, the steps of a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from orchard.cache.codecs import CommVQ, Int4
from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError, UsageError
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.linear import Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.recipes.compressing.plan import read_plan
from orchard.transforms.fit_codebooks import FitCodebooks
from orchard.transforms.kv4 import KV4
from orchard.transforms.kv_samples import fingerprint, samples_of
from orchard.transforms.share_kv import ShareKV, kv_bytes

QUICK = {"rounds": 3, "words": 8, "soft": 1, "steps": 2, "tokens": 400}


def model(seed: int = 0, head_dim: int = 16) -> Decoder:
    block = Block.Config(
        mixer=Attention.Config(heads=4, kv_heads=2, head_dim=head_dim), mlp=GatedMLP.Config(hidden_dim=32)
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(3)])
    made: Decoder = Decoder.Config(vocab=40, dim=32, context=64, stack=stack, head=None).complete().build()
    make = torch.Generator().manual_seed(seed)
    for part in made.modules():
        if isinstance(part, Weight):
            part.assign(torch.randn(part.shape, generator=make) * 0.2)
    return made.eval()


def texts(rows: int = 8, length: int = 48) -> list[Batch]:
    ids = np.random.default_rng(0).integers(0, 40, (rows, length))
    places = np.broadcast_to(np.arange(length), ids.shape).copy()
    return [Batch(ids, ids, places, np.zeros_like(places), plain=True)]


@torch.no_grad()
def said(decoder: Decoder, steps: list[int]) -> torch.Tensor:
    """Scores through the stores."""
    ids = torch.as_tensor(texts(2)[0].ids)
    cache = decoder.cache(batch=2, length=ids.shape[1])
    scores, start = [], 0
    for size in steps:
        places = torch.arange(start, start + size).expand(2, size)
        scores.append(decoder(ids[:, start : start + size], Context(places, cache=cache)))
        start += size
    return torch.cat(scores, dim=1)


def test_a_model_with_codes_says_much_the_same_and_step_by_step_exactly_the_same(tmp_path: Path) -> None:
    whole, file = model(), tmp_path / "books.safetensors"
    small = FitCodebooks(file=str(file), **QUICK).apply(whole, texts())
    assert file.is_file() and all(isinstance(cfg.codec, CommVQ.Config) for cfg in small.stores())
    assert [cfg.codec.layer for cfg in small.stores()] == [0, 1, 2]
    at_once, by_steps, before = said(small, [48]), said(small, [5, *[1] * 20, 23]), said(whole, [48])
    torch.testing.assert_close(by_steps, at_once, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(at_once[:, :4], before[:, :4], atol=1e-4, rtol=1e-4)  # the sinks
    apart = (at_once - before).norm() / before.norm()
    assert 0.001 < apart < 0.5
    assert kv_bytes(small.config) == 3 * 2 * 2 * (3 * 6 // 8 + 1 + 2) < kv_bytes(whole.config) / 6
    for name, weight in whole.named_parameters():
        assert weight.equal(dict(small.named_parameters())[name])


def test_a_file_that_is_there_is_taken_for_its_own_model_only(tmp_path: Path) -> None:
    file = tmp_path / "books.safetensors"
    fit = FitCodebooks(file=str(file), **QUICK)
    one = fit.apply(model(), texts())
    written = file.read_bytes()
    again = fit.apply(model().to(torch.bfloat16), ())  # no text is needed, and the type does not matter
    assert file.read_bytes() == written and again.config == one.config == fit(model().config)
    with pytest.raises(BadFile, match="another model"):
        fit.apply(model(seed=1), texts())
    with pytest.raises(BadFile, match="3 rounds of 8"):
        FitCodebooks(file=str(file), **{**QUICK, "rounds": 4}).apply(model(), ())
    assert fingerprint(model()) == fingerprint(model()) != fingerprint(model(seed=1))


def test_nothing_is_left_where_fitting_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "books.safetensors"
    with pytest.raises(UsageError, match="looks at texts"):
        FitCodebooks(file=str(file), **QUICK).apply(model(), ())
    with pytest.raises(ConfigError):
        FitCodebooks(file=str(file), bits=3)
    assert not list(tmp_path.iterdir())
    assert FitCodebooks(file="x").rounds_of(64) == 14 and FitCodebooks(file="x", bits=1).rounds_of(64) == 8


def test_only_layers_that_keep_their_own_are_fitted(tmp_path: Path) -> None:
    shared = ShareKV(last=1).apply(model())
    made = FitCodebooks(file=str(tmp_path / "b.safetensors"), **QUICK).apply(shared, texts())
    kinds = [type(block.mixer.config.store.codec).__qualname__ for block in made.stack.layers]
    assert kinds[:2] == ["CommVQ.Config"] * 2 and kinds[2] != "CommVQ.Config"
    torch.testing.assert_close(said(made, [6, *[1] * 42]), said(made, [48]), atol=1e-3, rtol=1e-3)


def test_samples_are_unrotated_and_leave_the_first_tokens_out() -> None:
    decoder, batch = model(), texts(1)
    found = samples_of(decoder, batch, tokens=10**6, skip=4, who="a test")
    assert sorted(found) == [0, 1, 2] and found[0].k.shape == (2, 44, 16) and found[0].looks.shape == (2, 8)
    mixer = decoder.stack.layers[0].mixer
    with torch.no_grad():
        x = decoder.embedding(torch.as_tensor(batch[0].ids), torch.float32)
        norm = decoder.stack.layers[0].mixer_norm
        k = mixer.k(norm(x)).unflatten(-1, (2, 16))[0, 4:].transpose(0, 1)
    torch.testing.assert_close(found[0].k, k, atol=2e-3, rtol=2e-3)


def test_four_bits_with_and_without_a_look_at_channels(tmp_path: Path) -> None:
    whole = model()
    blind, told = KV4().apply(whole), KV4(file=str(tmp_path / "c.safetensors")).apply(whole, texts())
    assert all(isinstance(cfg.codec, Int4.Config) and cfg.codec.sinks == 4 for cfg in told.stores())
    before = said(whole, [48])
    for small in (blind, told):
        assert (said(small, [48]) - before).norm() < 0.2 * before.norm()
        torch.testing.assert_close(said(small, [7, *[1] * 41]), said(small, [48]), atol=1e-3, rtol=1e-3)
    with pytest.raises(BadFile, match="another model"):
        KV4(file=str(tmp_path / "c.safetensors")).apply(model(seed=1), texts())


def test_plans_know_the_steps() -> None:
    plan = read_plan(["kv-commvq:file=b.safetensors,bits=1", "kv-int4"])
    first, second = (step.transform for step in plan.steps)
    assert isinstance(first, FitCodebooks) and first.bits == 1 and isinstance(second, KV4) and second.file is None
    assert plan.steps[0].looks and not plan.steps[1].looks
