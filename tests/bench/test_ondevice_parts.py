"""What the benchmark of compressed models is made of: texts, bars, names, ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.bench import ondevice_speed
from orchard.bench.ondevice import Bench, Options, kl_values, likeness_values, models_of
from orchard.bench.ondevice_claims import BARS, ORIGINAL, Q2_K, TORCHAO, bars_named, claims_of
from orchard.bench.ondevice_peers import EMBEDDING_4, EMBEDDING_LEFT, PeerFailed
from orchard.bench.ondevice_quality import Modules, compare
from orchard.bench.ondevice_texts import BadTexts, Given, parsed, rows_of
from orchard.core.errors import OrchardError, UsageError
from orchard.core.report import Value
from orchard.evals.likeness import Likeness, likeness
from orchard.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer_files
from tests.weights.compressed_models import VOCAB, built_with, written


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    files = tiny_tokenizer_files(VOCAB)
    return Tokenizer.from_bytes(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]))


def npy(path: Path, values: Any) -> Path:
    np.save(path, np.asarray(values))
    return path


# Texts --------------------------------------------------------------------------------------------------------------------


def test_arguments_name_a_kind_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    assert parsed([f"own={path}", f"web={tmp_path}"]) == [Given("own", path), Given("web", tmp_path)]
    (tmp_path / "empty").mkdir()
    (tmp_path / "b.bin").write_bytes(b"1")
    wrong = (["own"], ["own="], [f"poems={path}"], [f"own={path}", f"own={path}"], [f"own={path}x"])
    for arguments in (*wrong, [f"own={tmp_path / 'empty'}"], [f"own={tmp_path / 'b.bin'}"]):
        with pytest.raises(BadTexts) as refused:
            parsed(arguments)
        assert refused.value.hint


def test_the_three_kinds_of_files_hold_the_same_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["hello there", "and another one"]
    ids = [token for text in texts for token in tokenizer.encode(text)]
    (tmp_path / "t").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "t" / f"{number}.txt").write_text(text)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    npy(tmp_path / "t.npy", np.array(ids, np.uint16))
    for name in ("t", "t.jsonl", "t.npy"):
        rows = rows_of(Given("own", tmp_path / name), tokenizer, vocab=VOCAB, tokens=1000, window=1000)
        assert [row.tolist() for row in rows] == [ids], name


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 400), st.integers(1, 300), st.integers(1, 64))
def test_rows_are_pieces_of_the_text_that_do_not_meet(
    tmp_path_factory: pytest.TempPathFactory, length: int, tokens: int, window: int
) -> None:
    path = npy(tmp_path_factory.mktemp("rows") / "t.npy", np.arange(length, dtype=np.uint16))
    rows = rows_of(Given("own", path), None, vocab=length, tokens=tokens, window=window)  # type: ignore[arg-type]
    assert rows and len({len(row) for row in rows}) == 1
    assert all((np.diff(row) == 1).all() for row in rows)
    targets = [int(token) for row in rows for token in row[1:]]
    assert len(targets) == len(set(targets)) <= max(tokens + window - 1, 1)
    width = len(rows[0]) - 1
    assert len(targets) >= min(tokens, (length - 1) // width * width)


def test_many_rows_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    path = npy(tmp_path / "t.npy", np.arange(10_001))
    rows = rows_of(Given("own", path), None, vocab=10_001, tokens=40, window=10)  # type: ignore[arg-type]
    assert [int(row[0]) for row in rows] == [0, 2500, 5000, 7500]


def test_texts_that_nothing_can_be_measured_on_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "no.npy").write_bytes(b"not numpy at all")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"words": "x"}\n')
    (tmp_path / "worse.jsonl").write_text("{\n")
    npy(tmp_path / "floats.npy", [0.5, 1.0])
    npy(tmp_path / "one.npy", [3])
    npy(tmp_path / "foreign.npy", [3, VOCAB])
    npy(tmp_path / "negative.npy", [-1, 3])
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(BadTexts):
            rows_of(Given("own", path), tokenizer, vocab=VOCAB, tokens=8, window=8)


# Bars ---------------------------------------------------------------------------------------------------------------------


def test_claims_are_those_of_the_bars() -> None:
    mix = {claim.id: str(claim.bound) for claim in claims_of("m", "mix")}
    two = {claim.id: str(claim.bound) for claim in claims_of("m", "2bit")}
    assert mix == {
        "m-kv": "== 0.6333333333333333",
        "m-file": "<= 0.6",
        "m-bytes": "<= 58000000",
        "m-bits": "<= 3.2",
        "m-exact": "== 0",
        "m-decode": ">= 1.2",
        "m-ttft": ">= 1.3",
        "m-loss-own": "<= 1.08",
        "m-loss-books": "<= 1.08",
        "m-loss-wikipedia": "<= 1.12",
        "m-loss-web": "<= 1.12",
        "m-following": ">= 0.92",
        "m-kl-llama": "< 1.0",
        "m-kl-torchao": "< 1.0",
    }
    assert two == {
        **{name: bound for name, bound in mix.items() if name != "m-bits"},
        "m-file": "<= 0.46",
        "m-bytes": "<= 45000000",
        "m-decode": ">= 1.5",
        "m-loss-own": "<= 1.2",
        "m-loss-books": "<= 1.2",
        "m-loss-wikipedia": "<= 1.3",
        "m-loss-web": "<= 1.3",
        "m-following": ">= 0.75",
    }


def test_nineteen_thirtieths_are_met_exactly_or_not_at_all() -> None:
    claim = next(claim for claim in claims_of("m", "mix") if claim.id == "m-kv")
    for layers, good in ((19, True), (20, False), (18, False)):
        assert claim.judge({"m KV over original": Value(768 * layers / (768 * 30))}).passed is good


def test_models_say_which_bars_they_are_held_to(tmp_path: Path, empty_home: Path) -> None:
    path = written(tmp_path / "thing.orchard", built_with(()))
    other = written(tmp_path / "a-2bit.orchard", built_with(()))
    found = models_of([f"mix={path}", str(other)])
    assert [(one.name, one.bars, one.path) for one in found] == [("thing", "mix", path), ("a-2bit", "2bit", other)]
    assert bars_named("smollm2-mix") == "mix" and set(BARS) == {"mix", "2bit"}
    for wrong in ([str(path)], [], [str(other), f"mix={other}"], [f"mix={tmp_path / 'none.orchard'}"]):
        with pytest.raises(OrchardError):
            models_of(wrong)
    with pytest.raises(UsageError):
        bars_named("mix-of-2bit")


# Values -------------------------------------------------------------------------------------------------------------------


def test_ratios_of_speed_are_of_medians_and_more_is_better() -> None:
    figures = {
        ORIGINAL: {"decode 32": [100.0, 110.0, 90.0], "TTFT 2048": [2.0, 2.2, 1.8]},
        "m": {"decode 32": [150.0, 150.0, 150.0], "TTFT 2048": [1.0, 1.0, 1.0]},
    }
    values = ondevice_speed.values(figures)
    assert values["m decode 32 over original"].value == pytest.approx(1.5)
    gain = values["m TTFT 2048 gain over original"]
    assert gain.value == pytest.approx(2.0) and gain.low < 2.0 < gain.high  # type: ignore[operator]
    assert values["original decode 32"].unit == "tokens/s" and "original decode 32 over original" not in values


def alike(kl: float, tokens: int = 10) -> Likeness:
    return Likeness(tokens=tokens, loss=2.0, reference=1.0, kl=kl, agreement=0.5)


def test_of_two_forms_of_a_peer_the_closer_one_counts() -> None:
    found = {
        "own": {"m": alike(1.0), Q2_K: alike(2.0), EMBEDDING_LEFT: alike(4.0), EMBEDDING_4: alike(8.0)},
        "web": {"m": alike(3.0, 30), Q2_K: alike(2.0, 30), EMBEDDING_LEFT: alike(8.0, 30), EMBEDDING_4: alike(4.0, 30)},
    }
    values = kl_values(found, ["m"])
    assert values[f"m KL over {Q2_K}"].value == pytest.approx(2.5 / 2.0)
    assert values[f"m KL over {Q2_K} own"].value == pytest.approx(0.5)
    assert values[f"m KL over {TORCHAO}"].value == pytest.approx(2.5 / 5.0)
    assert "m KL over llama.cpp Q4_0" not in values
    assert likeness_values(found)["m KL"].value == pytest.approx(2.5)
    assert likeness_values(found)["m loss ratio web"].value == pytest.approx(2.0)


def test_subjects_are_held_against_the_reference_as_likeness_does() -> None:
    one, other = built_with(()), built_with(("formats",))
    rows = [torch.randint(0, VOCAB, (13,), generator=torch.Generator().manual_seed(n)).numpy() for n in range(6)]
    found = compare({"same": Modules(one), "other": Modules(other)}, Modules(one), rows)
    assert found["same"].kl == 0 and found["same"].agreement == 1 and found["same"].tokens == 6 * 12
    from orchard.bench.ondevice_quality import _batch

    direct = likeness(other, one, [_batch(row) for row in rows])
    assert found["other"].kl == pytest.approx(direct.kl, rel=1e-3) and direct.kl > 0
    assert found["other"].loss == pytest.approx(direct.loss, rel=1e-6)


class Dies:
    """A peer that gives one row, and then none."""

    def __init__(self, decoder: Any) -> None:
        self.well = Modules(decoder)

    def scores(self, rows: Any) -> Any:
        yield from self.well.scores(rows[:1])
        raise PeerFailed("weak", "killed")


def test_a_peer_that_dies_on_the_way_is_left_out_and_named(tmp_path: Path) -> None:
    model = built_with(())
    rows = [np.arange(9), np.arange(9)]
    run = Bench(Options(), [], [], tmp_path)
    found = run._compared({"m": Modules(model), "weak": Dies(model)}, Modules(model), rows)
    assert set(found) == {"m"} and found["m"].tokens == 16 and run.notes == ["weak: killed"]
    both = {"own": {"m": alike(1.0), "weak": alike(1.0)}, "web": found}
    assert "weak KL" not in likeness_values(both) and "weak KL own" in likeness_values(both)
