"""Neurons in a file: the same model, fewer bytes, counted; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.cache.experts import BudgetTooSmall, OtherModel, RecordsUnreadable
from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.nn.formats import Int4, Int8
from orchard.transforms.activity import Activity
from orchard.transforms.neurons import FromFlash, neuron_layers, spent, write_neurons
from orchard.transforms.neurons_file import NeuronLayer, usual_page
from orchard.transforms.relufy import Relufy
from tests.tiny import tiny_gguf
from tests.transforms.neuron_models import DIM, UNITS, VOCAB, built, gated, texts, tree, ungated

KINDS = {"gated": gated(), "gated, biases": gated(bias=True), "plain": ungated(bias=False), "plain, biases": ungated()}
IDS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def step_by_step(model: Any, ids: torch.Tensor, prompt: int = 4) -> torch.Tensor:
    """Scores of all tokens: the first ones together, the others one by one."""
    cache = model.cache(batch=len(ids), length=ids.shape[1])
    found, at = [], 0
    while at < ids.shape[1]:
        many = prompt if at == 0 else 1
        places = torch.arange(at, at + many).expand(len(ids), -1)
        found.append(model(ids[:, at : at + many], Context(places, cache=cache)))
        at += many
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_activity_gives_the_dense_model(kind: str, tmp_path: Path) -> None:
    model = built(KINDS[kind])
    write_neurons(model, tmp_path / "n")
    small = FromFlash(tmp_path / "n", activity="exact", window=3).apply(model)
    want = step_by_step(model, IDS)
    assert torch.allclose(step_by_step(small, IDS), want, atol=1e-5, rtol=1e-5)
    assert not [name for name, _ in small.named_parameters() if ".mlp." in name]
    told = spent(small)
    assert told.tokens == 24 and told.hits + told.loaded == told.wanted and told.hits > 0
    both = torch.cat([IDS, IDS.flip(1)])
    assert torch.allclose(step_by_step(small, both), step_by_step(model, both), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [0.03, 0.2, 1.0])
@pytest.mark.parametrize("window", [0, 3, 30])
def test_no_budget_and_no_window_changes_the_answer(budget: float, window: int, tmp_path: Path) -> None:
    model = built(gated())
    write_neurons(model, tmp_path / "n")
    whole = 2 * UNITS * 3 * DIM * 4
    small = FromFlash(tmp_path / "n", activity="exact", window=window, budget=int(budget * whole)).apply(model)
    assert torch.allclose(step_by_step(small, IDS, prompt=9), step_by_step(model, IDS, prompt=9), atol=1e-5)
    for layer in neuron_layers(small):
        assert layer.tally.peak <= layer.window.buffer.capacity <= max(2, budget * UNITS)


def test_bytes_and_reads_are_those_of_the_missing_neurons(tmp_path: Path) -> None:
    model = built(ungated(bias=False))
    write_neurons(model, tmp_path / "n", page=512)
    small = FromFlash(tmp_path / "n", activity="exact", window=0, join=False).apply(model)
    step_by_step(small, IDS, prompt=1)
    told = spent(small, reset=True)
    assert told.reads == told.loaded == told.wanted and told.bytes == 512 * told.loaded and told.resident == 0
    step_by_step(small, IDS, prompt=1)
    joined = FromFlash(tmp_path / "n", activity="exact", window=0).apply(model)
    step_by_step(joined, IDS, prompt=1)
    assert spent(joined).bytes == told.bytes and spent(joined).reads < told.reads
    wide = FromFlash(tmp_path / "n", activity="exact", window=8, join=False).apply(model)
    step_by_step(wide, IDS, prompt=1)
    assert spent(wide).loaded < told.loaded and spent(wide).wanted == told.wanted
    assert spent(small).tokens == 24  # counted anew after the reset


@pytest.mark.parametrize(
    ("used", "page"), [(6144, 2048), (8192, 4096), (1536, 512), (400, 512), (1100, 512), (12000, 4096)]
)
def test_pages_waste_little(used: int, page: int) -> None:
    assert usual_page(used) == page


def test_predicted_neurons_do_not_depend_on_what_came_before(tmp_path: Path) -> None:
    model = built(gated())
    predictors = Activity(rank=4, steps=20, recall=0.9).fit(model, texts())
    write_neurons(model, tmp_path / "n", predictors)
    small, again = (FromFlash(tmp_path / "n", window=window).apply(model) for window in (1, 12))
    first = step_by_step(small, IDS)
    step_by_step(again, IDS.flip(1))
    assert torch.allclose(step_by_step(again, IDS), first, atol=1e-5)
    assert not torch.allclose(first, step_by_step(model, IDS), atol=1e-4)  # what was missed is missed
    extras = FromFlash(tmp_path / "n", window=24, extras=True).apply(model)
    off = [(step_by_step(each, IDS) - step_by_step(model, IDS)).abs().mean() for each in (extras, small)]
    assert off[0] < off[1]


@pytest.mark.parametrize("cfg", [Int8.Config(half=True), Int8.Config(), Int4.Config(group=8)])
def test_packed_rows_keep_their_scales_beside_them(cfg: Any, tmp_path: Path) -> None:
    model = built(gated(bias=True))
    write_neurons(model, tmp_path / "n", format=cfg)
    layer = NeuronLayer.open(tmp_path / "n", "stack.layers.1.mlp")
    rows = layer.read([5, 6, 90])
    mlp: Any = model.stack.layers[1].mlp
    packer = cfg.build()
    for name in ("gate", "up"):
        want = packer.unpack(packer.pack(getattr(mlp, name).weight), torch.float32)[[5, 6, 90]]
        assert torch.equal(rows[:, layer.parts[name]], want)
        assert torch.equal(rows[:, layer.parts[f"{name}.bias"]][:, 0], getattr(mlp, name).bias[[5, 6, 90]])
    want = packer.unpack(packer.pack(mlp.down.weight.mT.contiguous()), torch.float32)[[5, 6, 90]]
    assert torch.equal(rows[:, layer.parts["down"]], want)
    small = FromFlash(tmp_path / "n", activity="exact").apply(model)
    assert torch.isfinite(step_by_step(small, IDS)).all()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_loaded_model_generates_from_a_file(dtype: str, tmp_path: Path) -> None:
    path, relu = tiny_gguf(tmp_path / "tiny.gguf"), Relufy()
    model = orchard.load(path, dtype=dtype, rewrite=relu)
    write_neurons(model.decoder, tmp_path / "n")
    flash = FromFlash(tmp_path / "n", activity="exact")
    small = orchard.load(path, dtype=dtype, rewrite=lambda tree: flash(relu(tree)))
    prompts = ["What is the capital of France?", "to be or not"]
    want = [model.generate(prompt, max_tokens=20).ids for prompt in prompts]
    assert [small.generate(prompt, max_tokens=20).ids for prompt in prompts] == want
    assert [answer.ids for answer in small.generate_many(prompts, max_tokens=20)] == want
    assert spent(small.decoder).loaded > 0


def test_a_disk_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    model = built(gated())
    write_neurons(model, tmp_path / "n")
    small = FromFlash(tmp_path / "n", activity="exact", window=2).apply(model)
    want = step_by_step(small, IDS)
    data = (tmp_path / "n").read_bytes()
    with (tmp_path / "n").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(RecordsUnreadable):
        step_by_step(small, IDS.flip(1))
    (tmp_path / "n").write_bytes(data)
    assert torch.allclose(step_by_step(small, IDS), want, atol=1e-5)
    for layer in neuron_layers(small):
        held = layer.window.buffer.resident()
        rows = layer.store.read(held)
        assert torch.equal(layer.window.buffer.matrix(), rows)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_engine_survives_a_lost_disk(dtype: str, tmp_path: Path) -> None:
    path, relu, file = tiny_gguf(tmp_path / "tiny.gguf"), Relufy(), tmp_path / "n"
    write_neurons(orchard.load(path, dtype="float32", rewrite=relu).decoder, file)
    flash = FromFlash(file, activity="exact", window=0)
    small = orchard.load(path, dtype=dtype, rewrite=lambda tree: flash(relu(tree)))
    want, data = small.generate("to be or not", max_tokens=6).ids, file.read_bytes()
    with file.open("r+b") as cut:
        cut.truncate(5000)
    with pytest.raises(RecordsUnreadable) as caught:
        small.generate("what is the capital", max_tokens=6)
    assert caught.value.retryable
    file.write_bytes(data)
    assert small.generate("to be or not", max_tokens=6).ids == want


def test_a_copy_reads_the_same_file(tmp_path: Path) -> None:
    model = built(gated())
    write_neurons(model, tmp_path / "n")
    small = FromFlash(tmp_path / "n", activity="exact").apply(model)
    other = copy.deepcopy(small)
    assert torch.allclose(step_by_step(other, IDS), step_by_step(small, IDS), atol=1e-6)
    assert neuron_layers(other)[0].window is not neuron_layers(small)[0].window
    halved = small.to(torch.bfloat16)
    assert torch.isfinite(step_by_step(halved, IDS)).all() and halved.dtype == torch.bfloat16


def test_what_is_refused(tmp_path: Path) -> None:
    model, other = built(gated()), built(gated(), seed=5)
    with torch.no_grad():
        other.norm.weight.mul_(2)
    write_neurons(model, tmp_path / "n")
    with pytest.raises(OtherModel):
        FromFlash(tmp_path / "n", activity="exact").apply(other)
    with pytest.raises(UsageError, match="no predictor"):
        FromFlash(tmp_path / "n").apply(model)
    with pytest.raises(UnsupportedPair, match="never silent"):
        FromFlash(tmp_path / "n")(tree(gated("silu")))
    with pytest.raises(UnsupportedPair, match="silu"):
        write_neurons(built(gated("silu")), tmp_path / "m")
    with pytest.raises(OtherModel):
        FromFlash(tmp_path / "n")(tree(gated(), layers=1))
    narrow = tree(gated()).set("stack.layers[0].mlp.hidden_dim", 48)
    with pytest.raises(OtherModel, match="96 neurons"):
        FromFlash(tmp_path / "n", activity="exact")(narrow).build()
    with pytest.raises(BudgetTooSmall):
        FromFlash(tmp_path / "n", budget=100)(tree(gated()))
    with pytest.raises(ConfigError):
        FromFlash(tmp_path / "n", window=-1)
    with pytest.raises(ConfigError):
        FromFlash(tmp_path / "n", activity="guessed")
    with pytest.raises(UsageError, match="no ReLU layer"):
        write_neurons(model, tmp_path / "m", {"stack.layers.7.mlp": None})  # type: ignore[dict-item]
    (tmp_path / "cut").write_bytes((tmp_path / "n").read_bytes()[:-4096])
    with pytest.raises(BadFile):
        FromFlash(tmp_path / "cut")(tree(gated()))
    assert not (tmp_path / "m").exists()
