"""The parts of the afm-2025-device study, and a tiny run of all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orchard.generate.lowering import lower
from orchard.nn.formats import Blocks
from orchard.studies import _afm_blocks as blocks
from orchard.studies import _afm_engine as engine
from orchard.studies import _afm_ground as ground_
from orchard.studies import _afm_text as text
from orchard.studies import _afm_two_bits as two_bits
from orchard.studies import afm_2025_device
from orchard.studies._afm_ground import Ground
from orchard.studies.harness import study
from orchard.transforms.share_kv import ShareKV

TINY = Ground(dim=64, layers=8, rows=2, length=32, steps=4, held_out=4)


# The language -----------------------------------------------------------------------------------------------------------


def test_a_seed_says_what_is_written_and_nothing_else() -> None:
    one, other = text.language().text(1, 3000), text.language().text(2, 3000)
    assert one == text.Language().text(1, 3000) and one != other and len(one) == 3000
    assert one.startswith(text.language().text(1, 500)) and one.isascii()
    records = [line for line in one.splitlines()[:-1] if line.startswith("{")]
    assert records and all(engine.valid(line) for line in records)


def test_one_token_a_character() -> None:
    said = text.language().text(3, 400) + '~!"\\'
    ids = text.tokenizer().encode(said)
    assert ids == text.ids_of(said).tolist() and text.tokenizer().decode(ids) == said


@pytest.mark.parametrize(
    ("record", "right"),
    [
        ('{"name":"Bo","age":7,"town":"Li","tags":["a"]}', True),
        ('{"name":"bo","age":7,"town":"Li","tags":["a"]}', False),
        ('{"name":"Bo","age":0,"town":"Li","tags":["a"]}', False),
        ('{"name":"Bo","age":true,"town":"Li","tags":["a"]}', False),
        ('{"name":"Bo","age":7,"town":"Li","tags":[]}', False),
        ('{"name":"Bo","age":7,"town":"Li","tags":["A"]}', False),
        ('{"age":7,"name":"Bo","town":"Li","tags":["a"]}', False),
        ("[]", False),
        ("{", False),
    ],
)
def test_what_counts_as_a_record(record: str, right: bool) -> None:
    assert engine.valid(record) is right


# The ground -------------------------------------------------------------------------------------------------------------


def test_training_repeats_and_compared_models_read_the_same() -> None:
    one, again = (ground_.base(TINY, 5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    a, b = (next(iter(ground_.batches(TINY, 2, 5, "some"))) for _ in range(2))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.ids[0, 1:], a.targets[0, :-1])
    longer = replace(TINY, steps=40, rate=3e-3)
    assert ground_.loss(ground_.base(longer, 5), TINY, 5) < ground_.loss(one, TINY, 5)


def test_learned_scales_have_a_rate_of_their_own() -> None:
    student = two_bits.Qat(bits=2, group=None, embedding=None).apply(ground_.built(ground_.tree(TINY), 1, "x"))
    was = {name: value.detach().clone() for name, value in student.named_parameters()}
    read = ground_.batches(TINY, 1, 1, "x")
    ground_.learn(student, ground_.NextToken.Config().build(), read, 1, 1e-2, seed=1, title="", decay=0.0, scales=0.0)
    moved = {name for name, value in student.named_parameters() if not torch.equal(value, was[name])}
    assert moved and not any(name.endswith(ground_.SCALES) for name in moved)


def test_bytes_are_those_of_the_formats() -> None:
    model = ground_.built(ground_.tree(TINY), 1, "x")
    assert ground_.nbytes(model) == 2 * sum(value.numel() for value in model.parameters())
    packed = two_bits.Rtn(format=Blocks.Config()).apply(model)
    assert 128 / 36 < ground_.linear_bits(packed) < 4.2 and ground_.linear_bits(model) == 16
    assert ground_.checksum(packed) == ground_.checksum(two_bits.Rtn(format=Blocks.Config()).apply(model))
    assert ground_.checksum(packed) != ground_.checksum(model)


# The engine -------------------------------------------------------------------------------------------------------------


def test_a_prompt_stops_where_nothing_more_is_kept() -> None:
    tree = ground_.tree(TINY)
    full, shared = (lower(ground_.built(each, 1, "x")) for each in (tree, ShareKV(share=0.375)(tree)))
    long = [engine.prefill_flops(plan, 512) for plan in (full, shared)]
    short = [engine.prefill_flops(plan, 1) for plan in (full, shared)]
    assert long[1] / long[0] < 0.66 and short[1] / short[0] > 0.9
    layer, table = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192, 128 * 64
    assert short[0] == 2 * (8 * layer + table) + 8 * 4 * 64


# The codec --------------------------------------------------------------------------------------------------------------


def test_the_codec_alone_is_given_the_same_bytes() -> None:
    weight = torch.randn(48, 60, generator=torch.Generator().manual_seed(1))
    codec, off = Blocks.Config().build().nbytes((48, 60), torch.float16), blocks.coded(weight) - weight
    assert torch.equal(blocks.with_wide_rows(weight, off, 0), off)
    one, two = (blocks.with_wide_rows(weight, off, extra) for extra in (1, 2 * (48 + 60)))
    assert (one != off).any(1).sum() == 1 and one.norm() < off.norm()  # a byte buys a whole row
    wide = (two != off).any(1).sum()
    assert wide * (60 + 2 - codec / 48) >= 2 * (48 + 60) > (wide - 1) * (60 + 2 - codec / 48)
    assert blocks.with_wide_rows(weight, off, 10**6).norm() < 0.02 * weight.norm()


# The whole --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_study_runs_and_every_claim_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = afm_2025_device.Scale(
        ground=replace(TINY, steps=40),
        training=two_bits.Training(steps=2, recover_rows=1, texts=1),
        draft_steps=2,
        prompts=2,
        answer=8,
        records=2,
    )
    monkeypatch.setitem(afm_2025_device.SCALES, "small", tiny)
    monkeypatch.setattr(two_bits, "SEEDS", 1)
    monkeypatch.setattr(blocks, "RANKS", (1, 2))
    report = study("afm-2025-device", seed=1)
    assert all(claim.value is not None for claim in report.claims)
    for name, wanted in {
        "kv_bytes_ratio": 0.625,
        "kv_bytes_ratio_held": 0.625,
        "qat_bytes_over_ptq": 0,
        "qat_packing_change": 0,
        "recover_bases_changed": 0,
        "draft_differences": 0,
        "guided_valid": 1,
    }.items():
        assert report[name] == wanted, name
    assert report["prefill_flops_ratio"] <= 0.68 and report["guided_calls_ratio"] < 1
    assert report["recover_tokens"] <= 0.05 * report["tokens"]
    ranks = report.series["rank, bits, error with a side path, error of the codec at the same bytes"]
    assert [row[0] for row in ranks] == [1, 2] and ranks[0][1] < ranks[1][1]
