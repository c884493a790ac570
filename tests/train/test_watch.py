"""How a run is going: what is counted, what is measured, and what people are told."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchard.core.batch import IGNORED, Batch, GroupBatch, PairBatch
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.train import watch_peak
from orchard.train.clip import Norm
from orchard.train.step import Taken
from orchard.train.watch import Lines, Watch, in_words
from orchard.train.watch_costs import Costs, costs_of
from orchard.train.watch_peak import Peak, known_peak, peak_of
from orchard.transforms.lora import Lora, freeze_base

VOCAB, DIM, HEADS, WIDE, HIDDEN = 50, 16, 2, 8, 32
ATTENTION = DIM * DIM + 2 * DIM * WIDE + DIM * DIM  # q, k and v of one head, o
MLP = 3 * DIM * HIDDEN


def model(*, tied: bool = True, window: int | None = None, mlp: Any = None) -> Decoder:
    mixer = Attention.Config(heads=HEADS, kv_heads=1, head_dim=WIDE)
    block = Block.Config(mixer=mixer, mlp=mlp or GatedMLP.Config(hidden_dim=HIDDEN))
    second = block.clone(mixer=mixer.clone(window=window))
    head = None if tied else Linear.Config()
    stack = Stack.Config(layers=[block, second])
    made: Decoder = Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=stack, head=head).build()
    return made


def batch(*lengths: int, padding: int = 3, learnt: int | None = None) -> Batch:
    """One row of documents of these lengths, and some padding."""
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.full(padding, -1)])[None]
    documents = np.concatenate([*(np.full(n, i) for i, n in enumerate(lengths)), np.full(padding, -1)])[None]
    targets = np.where(positions >= 0, 1, IGNORED)
    if learnt is not None:
        targets[0, learnt:] = IGNORED
    return Batch(ids=np.zeros_like(positions), targets=targets, positions=positions, documents=documents)


# What is counted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_multiply_cost_six_and_a_lookup_nothing(tied: bool) -> None:
    made = model(tied=tied)
    assert costs_of(made).weights == 6 * (2 * (ATTENTION + MLP) + VOCAB * DIM)
    counted = sum(p.numel() for p in made.parameters() if p.dim() > 1)
    assert counted * 6 - costs_of(made).weights == (0 if tied else 6 * VOCAB * DIM)


def test_frozen_weights_cost_four_beside_side_paths_that_cost_six() -> None:
    adapted = Lora(r=3, alpha=6.0).attach(model())
    freeze_base(adapted)
    sides = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert costs_of(adapted).weights == 4 * (2 * (ATTENTION + MLP) + VOCAB * DIM) + 6 * sides


def test_packed_weights_cost_what_the_matrix_costs() -> None:
    packed = model().config.rewrite(Linear, lambda cfg: cfg.clone(format=Int8.Config())).build()
    assert costs_of(packed).weights == 4 * 2 * (ATTENTION + MLP) + 6 * VOCAB * DIM


def test_of_experts_only_those_that_a_token_meets() -> None:
    mixture = MoE.Config(hidden_dim=HIDDEN, experts=4, router=TopK.Config(k=2))
    cost = costs_of(model(mlp=mixture)).weights
    router = 4 * DIM
    assert cost == 6 * (2 * (ATTENTION + router + 2 * MLP) + VOCAB * DIM)


def test_other_modules_are_counted_by_their_matrices() -> None:
    plain = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 5), nn.LayerNorm(5))
    assert costs_of(plain) == Costs(6 * 20)


def test_attention_grows_with_the_documents_and_not_with_the_row() -> None:
    cost = costs_of(model(window=4))
    each = 12.0 * HEADS * WIDE
    assert cost.attention == ((each, None), (each, 4))
    whole = Costs(0.0, cost.attention[:1])
    assert whole.of(batch(5, 3)) == each * (5 * 5 + 3 * 3), "tokens times the length of their document"
    assert whole.of(batch(5, 3)) == whole.of(batch(5)) + whole.of(batch(3, padding=20))
    windowed = Costs(0.0, cost.attention[1:])
    assert windowed.of(batch(6)) == each * (1 + 3 + 4 + 4 + 4 + 4)
    assert Costs(7.0).of(batch(5, 3, learnt=2)) == 7.0 * 8, "what is read counts, learnt from or not"


def test_batches_of_every_kind() -> None:
    one, cost = batch(4), Costs(2.0)
    assert cost.of(PairBatch(chosen=one, rejected=batch(6))) == 20
    group = GroupBatch(batch=one, behaviour=np.zeros((1, 7)), rewards=np.zeros(1), groups=np.zeros(1))
    assert cost.of(group) == 8 and cost.of(one.to("cpu")) == 8


# The peak -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tera"),
    [
        ("NVIDIA H200", "bfloat16", False, 989),
        ("NVIDIA H100 80GB HBM3", "float32", True, 494),
        ("NVIDIA H100 PCIe", "bfloat16", False, 756),
        ("NVIDIA H100 NVL", "bfloat16", False, 835),
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5),
        ("NVIDIA L40S", "bfloat16", False, 362),
        ("NVIDIA L40", "bfloat16", False, 181),
        ("NVIDIA L4", "bfloat16", False, 121),
        ("NVIDIA GeForce RTX 4090", "bfloat16", True, 165.2),
    ],
)
def test_data_sheets(name: str, dtype: str, tf32: bool, tera: float) -> None:
    peak = known_peak(name, dtype, tf32=tf32)
    assert peak is not None and peak.flops == tera * 1e12 and not peak.measured and name in peak.words


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA H20", "Radeon", ""])
def test_other_devices_are_not_taken_for_known_ones(name: str) -> None:
    assert known_peak(name, "bfloat16", tf32=False) is None


def test_a_cpu_is_measured_once_and_shortly_without_random_numbers() -> None:
    watch_peak._measured.cache_clear()
    state = torch.random.get_rng_state()
    begun = time.process_time()
    peak = peak_of("cpu", "float32")
    assert time.process_time() - begun < 2.0, "some 0.15 s, on a machine that is not busy"
    assert peak is not None and peak.measured and peak.flops > 1e8 and "measured" in peak.words
    assert peak_of("cpu", "float32") is peak
    assert torch.equal(torch.random.get_rng_state(), state)
    assert peak_of("cpu", "float32", measure=False) is None and peak_of("meta", "float32") is None


# The watch ------------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def taken(loss: float = 2.0) -> Taken:
    return Taken(loss=loss, weight=10.0, norm=Norm(0.5), rate=0.1)


def watching(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Watch, Clock]:
    clock = Clock(monkeypatch)
    watch = Watch(model(), device=torch.device("cpu"), measure=False, **settings)
    watch.__dict__["peak"] = Peak(1e9, True, "1 GFLOP/s, measured")
    return watch, clock


def test_speed_and_share_are_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = watching(monkeypatch, steps=1000)
    rows = batch(5, 3)
    operations = watch.costs.of(rows)
    for number in range(60):
        clock.now += 10.0 if number < 30 else 2.0  # what was slow before is forgotten
        point = watch.note(number, taken(), rows.tokens, {"z": 1.0}, rows)
    assert point["tokens/s"] == pytest.approx(4.0) and point["mfu"] == pytest.approx(operations / 2.0 / 1e9)
    assert list(point) == ["loss", "z", "norm", "rate", "tokens/s", "mfu"]
    assert watch.curves["step"] == list(range(1, 61)), "steps that were taken, as for held-out losses"
    assert watch.left(60) == pytest.approx(940 * (30 * 10 + 30 * 2) / 60)
    value = watch.values()["MFU"]
    assert (
        value.unit == "%"
        and value.low is not None
        and value.low <= value.value <= value.high
        and "measured" in value.note
    )  # type: ignore[operator]


def test_several_processes_share_the_tokens_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch(5, 3)
    alone, clock = watching(monkeypatch)
    clock.now += 1.0
    one = alone.note(0, taken(), rows.tokens, {}, rows)
    shared, clock = watching(monkeypatch, processes=2)
    clock.now += 1.0
    two = shared.note(0, taken(), 2 * rows.tokens, {}, rows)
    assert two["tokens/s"] == 2 * one["tokens/s"] and two["mfu"] == pytest.approx(one["mfu"])


def test_a_step_from_which_nothing_is_learnt_and_one_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching(monkeypatch)
    assert watch.left(0) is None and watch.values() == {}
    point = watch.note(0, taken(math.nan), 0, {}, batch(3, learnt=0))
    assert math.isnan(point["loss"]) and watch.curves["loss"] == [None] and point["tokens/s"] == 0
    assert "loss nan" in watch.words(1, point)


def test_without_a_peak_there_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(model(), device=torch.device("cpu"), measure=False)
    assert "mfu" not in watch.note(0, taken(), 4, {}) and watch.values() == {}


@pytest.mark.parametrize(
    ("point", "measured", "words"),
    [
        ({"loss": 2.34567, "tokens/s": 12345.6, "mfu": 0.314}, False, "loss 2.3457, 12,346 tokens/s, 31 % MFU"),
        ({"loss": 2.0, "tokens/s": 5.0, "mfu": 0.0314}, True, "loss 2.0000, 5 tokens/s, ~3.1 % MFU"),
        ({"loss": 2.0, "mfu": 0.00012345}, False, "loss 2.0000, 0.012 % MFU"),
        ({"loss": 2.0, "mfu": math.nan}, False, "loss 2.0000"),
        ({}, False, ""),
    ],
)
def test_a_step_in_words(point: dict[str, float], measured: bool, words: str) -> None:
    assert in_words(point, measured=measured) == words


def test_a_log_gets_a_line_now_and_then() -> None:
    said: list[str] = []
    now = 0.0
    lines = Lines(said.append, steps=100, every=30.0, clock=lambda: now)
    for step in range(11, 101):  # a run that goes on
        now += 4.0
        lines(step, {"loss": 1.0, "tokens/s": 10.0})
    assert said[0] == "step 11 of 100: loss 1.0000, 10 tokens/s"
    assert said[1] == "step 19 of 100: loss 1.0000, 10 tokens/s, 5 min 24 s left"
    assert said[-1] == "step 100 of 100: loss 1.0000, 10 tokens/s" and len(said) == 13
    unknown = Lines(said.append, clock=lambda: now)
    unknown(1, {"loss": 1.0})
    assert said[-1] == "step 1: loss 1.0000"
