"""LoRA on config trees and built models: nothing changes at first, only side paths train, and all forms agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import Lora, LoraLinear, freeze_base, merged, sides_of, with_sides
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.tiny import tiny_gguf

IDS = torch.tensor([[5, 17, 3, 38, 41, 2, 9, 20]])


def tree(mlp: Any = None, **more: Any) -> Any:
    layers = [
        Block.Config(
            mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8),
            mlp=(mlp or GatedMLP.Config(hidden_dim=40)).clone(),
        )
        for _ in range(2)
    ]
    return Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers), **more)


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "lora" not in name:
                parameter.mul_(8)
    return model.eval()


def stir(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)


@torch.no_grad()
def scores(model: Decoder) -> torch.Tensor:
    return model(IDS)


def paths(cfg: Any) -> set[str]:
    return {path for path, _ in cfg.find(LoraLinear)}


def test_targets() -> None:
    cfg = tree()
    parts = {f"stack.layers[{i}].{part}" for i in (0, 1) for part in ("mixer.q", "mixer.v")}
    assert paths(Lora(targets=("q", "v"))(cfg)) == parts
    assert paths(Lora(targets=("q_proj", "mixer.v"))(cfg)) == parts
    assert paths(Lora(targets="stack.layers[1].mlp.*")(cfg)) == {
        f"stack.layers[1].mlp.{x}" for x in ("gate", "up", "down")
    }
    assert len(paths(Lora()(cfg))) == 14 and "head" not in paths(Lora()(cfg))
    assert paths(Lora(targets="head")(cfg)) == {"head"}
    mixture = tree(MoE.Config(hidden_dim=16, experts=4))
    assert len(paths(Lora()(mixture))) == 8  # neither experts nor routers


def test_what_cannot_be_adapted_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'wq'"):
        Lora(targets=("q", "wq"))(tree())
    mixture = tree(MoE.Config(hidden_dim=16, experts=4))
    with pytest.raises(UnsupportedPair, match=r"stack\.layers\[0\]\.mlp\.up"):
        Lora(targets="up")(mixture)
    with pytest.raises(UnsupportedPair, match=r"stack\.layers\[0\]\.mlp\.up"):
        Lora(targets="up").attach(built(mixture))
    with pytest.raises(ConfigError, match="already"):
        Lora(targets="q")(Lora(targets="q")(tree()))
    for wrong in ({"r": 0}, {"r": 1.5}, {"alpha": float("nan")}, {"dropout": 1.0}):
        with pytest.raises(ConfigError):
            Lora(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stack\.layers\.9\.mixer\.q"):
        with_sides(built(tree()), {"stack.layers.9.mixer.q": [(np.ones((1, 32)), np.ones((32, 1)), 1.0)]})
    with pytest.raises(ConfigError, match=r"stack\.layers\.0\.mixer\.q"):
        with_sides(built(tree()), {"stack.layers.0.mixer.q": [(np.ones((1, 31)), np.ones((32, 1)), 1.0)]})
    with pytest.raises(UnsupportedPair, match="mixer_norm is a RMSNorm"):
        with_sides(built(tree()), {"stack.layers.0.mixer_norm": [(np.ones((1, 32)), np.ones((32, 1)), 1.0)]})


def test_the_tree_survives_text_and_builds_the_identical_model() -> None:
    plain, cfg = built(tree()), Lora(r=4)(tree())
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg and tree() == tree()
    adapted = built(cfg)
    missing = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("lora_" in key for key in missing.missing_keys)
    assert torch.equal(scores(adapted), scores(plain))
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in cfg.build().parameters())


def test_attaching_shares_every_tensor_and_changes_nothing() -> None:
    model = built(tree())
    before = dict(model.named_parameters())
    twin = Lora(r=4, alpha=8).attach(model)
    assert {name: id(value) for name, value in model.named_parameters()} == {n: id(v) for n, v in before.items()}
    assert all(dict(twin.named_parameters())[name] is value for name, value in before.items())
    assert torch.equal(scores(twin), scores(model))
    assert paths(twin.config) == paths(Lora(r=4, alpha=8)(tree())) and not paths(model.config)
    stir(twin)
    assert (scores(twin) - scores(model)).abs().max() > 0.1
    assert not any(isinstance(module, LoraLinear) for module in model.modules())


def test_scale_and_dropout() -> None:
    model = built(tree())
    assert LoraLinear.around(model.stack.layers[0].mixer.q, 4, 6).scale == 1.5
    assert LoraLinear.around(model.stack.layers[0].mixer.q, 4, 6, rslora=True).scale == 3.0
    twin = Lora(r=4, dropout=0.5).attach(model)
    stir(twin)
    assert torch.equal(scores(twin), scores(twin))
    assert not torch.equal(scores(twin.train()), scores(twin))


def test_only_side_paths_train_and_they_learn() -> None:
    model = built(tree())
    twin = Lora(r=4, alpha=8).attach(model)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    trained = freeze_base(twin)
    assert sum(value.numel() for value in trained) == sum(
        4 * sum(m.shape) for m in twin.modules() if isinstance(m, LoraLinear)
    )
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    target, losses = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(twin(IDS)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


def test_merged_is_the_same_and_packed_weights_refuse() -> None:
    model = built(tree())
    twin = Lora(r=4, alpha=8).attach(model)
    stir(twin)
    flat = merged(twin)
    assert torch.allclose(scores(flat), scores(twin), atol=1e-4)
    assert flat.config == model.config and flat.state_dict().keys() == model.state_dict().keys()
    assert flat.embedding.weight is model.embedding.weight
    packed = built(Lora(r=4)(tree().rewrite(Linear, lambda node: node.clone(format=Int8.Config()))))
    with pytest.raises(UnsupportedPair, match="Int8"):
        merged(packed)


def test_sides_out_and_in_again() -> None:
    model = built(tree())
    twin = Lora(r=4, alpha=8, rslora=True).attach(model)
    stir(twin)
    found = sides_of(twin)
    assert found["stack.layers.0.mixer.q"][2] == 4.0
    again = with_sides(model, {path: [side] for path, side in found.items()})
    assert torch.allclose(scores(again), scores(twin), atol=1e-6)
    half = {path: [(a, b, scale / 2)] * 2 for path, (a, b, scale) in found.items()}  # two halves make a whole
    assert torch.allclose(scores(with_sides(model, half)), scores(twin), atol=1e-5)
    on_top = with_sides(again, {path: [(a, -b, scale)] for path, (a, b, scale) in found.items()})
    assert torch.allclose(scores(on_top), scores(model), atol=1e-4)


def test_a_model_with_side_paths_lowers_whole() -> None:
    twin = Lora(r=3, alpha=8).attach(built(tree()))
    stir(twin)
    plan = lower(twin, stores="f32")
    assert plan.whole
    ids = IDS[0].tolist()
    got = Reference(plan, 1, len(ids)).run(ids, [0] * len(ids), range(len(ids)), range(len(ids)))
    assert np.abs(got - scores(twin)[0].numpy()).max() < 1e-4


def test_a_checkpoint_loads_with_side_paths_that_do_nothing_yet(tmp_path: Path) -> None:
    """A rewrite that adds side paths: the file has none of their tensors, so they begin as they do in a new model."""
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with open_checkpoint(path) as checkpoint:
        plain = load_decoder(checkpoint)
        adapted = load_decoder(checkpoint, Lora(r=2, alpha=4)(checkpoint.config()))
    assert sum(isinstance(module, LoraLinear) for module in adapted.modules()) > 0
    ids = torch.arange(6)[None] % plain.config.vocab
    with torch.no_grad():
        assert torch.equal(plain(ids), adapted(ids))
        assert all(bool(p.abs().sum() > 0) for name, p in adapted.named_parameters() if name.endswith("lora_a"))
