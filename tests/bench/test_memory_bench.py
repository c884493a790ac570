"""`orchard bench memory`: policies, budgets and ways of keeping on a tiny model; answers that count, bars that judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from orchard.bench import memory as bench
from orchard.bench.memory import Bench, run_and_save
from orchard.bench.memory_chart import curves, lines_of
from orchard.bench.memory_measure import Asked, Outcome, likelihoods, measure
from orchard.bench.memory_model import codecs, embedding, keeper, opened, rewriting
from orchard.bench.memory_options import Budget, Options, named
from orchard.bench.memory_policies import POLICIES, Settings, encoded, memory
from orchard.bench.memory_report import Row, Subject, judged, wilson
from orchard.bench.memory_tasks import recall
from orchard.core.errors import BadFile, OrchardError, UsageError
from orchard.core.report import Report
from orchard.generate.memory.lexical import Lexical
from orchard.ops.kernels.native import library
from orchard.transforms.fit_codebooks import FitCodebooks
from orchard.transforms.kv_samples import fingerprint
from tests.cache.vq_files import random_books, write_books
from tests.session.export_models import folder_of

SMALL = {"tokens": 200, "talks": 1, "questions": 2, "decode": 2, "embedder": "lexical", "episodes": 2, "medoids": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(folder_of(tmp_path_factory.mktemp("model") / "tiny"))


def test_all_policies_over_codecs_and_owners(folder: str, tmp_path: Path) -> None:
    options = Options(model=folder, codecs=("own", "int8"), owners=("own", "share-kv:last=1"), budgets=("8x",), **SMALL)
    target = tmp_path / "memory.json"
    made, report, places = run_and_save(options, save=True, target=target)
    assert places == [target, tmp_path / "memory.svg"] and Report.load(target).series == report.series
    assert len(made.rows) == 4 * (1 + 5)
    for row in made.rows.values():
        (one,) = row.outcomes
        assert len(one.right) == 2 and len(one.first) == 2 and len(one.decode) == 2 and one.nbytes > 0
        assert one.peak <= one.limit and (row.subject.policy == "full" or one.budget < one.tokens)
    assert report["peak over budget and block"] <= 1.0
    assert {claim.id for claim in report.claims} == {"peak", "episodic-over-best", "episodic-over-full"}
    size = {label: report[f"{label} bytes"] for label in ("full", "recent 8x", "recent 8x int8")}
    assert size["recent 8x int8"] < size["recent 8x"] < size["full"]
    assert report["recent 8x share-kv:last=1 bytes"] < size["recent 8x"]
    picture = ElementTree.parse(places[1]).getroot()
    kinds = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert kinds.count("polyline") == 4 * 6 and kinds.count("circle") == len(made.rows)


@pytest.mark.skipif(library() is None, reason="no native kernels")
def test_torch_and_native_engines_hold_the_same(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories of the two engines give the same likelihoods, to what keys and values are rounded to."""
    model = opened(folder, "own", "own")
    native, name = keeper(model)
    assert name == "native"
    monkeypatch.setenv("ORCHARD_NATIVE", "0")
    from orchard.generate.memory.torch_kept import TorchKept

    talk = recall(0, tokens=200, questions=2, count=lambda text: len(model.tokenizer.encode(text)))
    whole = encoded(model.tokenizer, talk.begin, talk.utterances)
    asked = Asked.of(model.tokenizer, talk.questions[0])
    for policy in ("recent", "kvzip", "episodic"):
        settings = Settings(40, 64, episodes=2, medoids=1)
        found = []
        for make in (native, lambda **given: TorchKept(model.decoder, **given)):
            one = memory(policy, make, Lexical, settings)
            one.hear(whole)
            one.turn(asked.text)
            scores = one.read(asked.prompt, wanted=1)[0]
            found.append(likelihoods(one, scores, asked.choices))
            assert one.peak <= settings.budget + settings.block
        if policy == "recent":  # scores that are nearly equal may choose other tokens elsewhere
            assert np.allclose(*found, atol=0.15)


class Parrot:
    """A memory that knows which tokens follow: enough to see what is counted."""

    def __init__(self, follow: dict[int, int]) -> None:
        self.follow, self.kept, self.held = follow, self, [0]
        self.budget, self.block, self.nbytes, self.peak, self.read_tokens = 10, 5, 77, 3, 9
        self.saves = 0

    def hear(self, talk: Any) -> None:
        self.heard = talk

    def turn(self, question: str) -> None:
        self.held = [0]

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        self.held += tokens
        scores = np.zeros((wanted, 20), np.float32)
        for row, token in zip(scores, self.held[len(self.held) - wanted :], strict=True):
            row[self.follow.get(token, 0)] = 5.0
        return scores

    def save(self) -> dict[str, np.ndarray]:
        self.saves += 1
        return {"held": np.array(self.held)}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.held = arrays["held"].tolist()


def test_the_likeliest_choice_counts_and_nothing_is_left_behind(folder: str) -> None:
    parrot: Any = Parrot({7: 3, 3: 4, 4: 5})
    talk = encoded(opened(folder, "own", "own").tokenizer, "", ["Anna: hello.\n"])
    questions = [
        Asked("?", [1, 7], [[2, 4], [3, 4, 5], [3, 5]], 1),
        Asked("?", [1, 7], [[2], [3]], 0),
        Asked("?", [7], [[3, 9], [9]], 0),
    ]
    found = measure(parrot, talk, questions, decode=3)
    assert found.right == [True, False, True] and found.nbytes == 77 and found.peak == 3 and found.limit == 15
    assert parrot.saves == 2 and parrot.held == [0, 7]  # single tokens need no second look
    assert len(found.decode) == 2 and len(found.first) == 3


def test_an_interrupt_keeps_what_is_done(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = bench.measure, []

    def breaking(*given: Any, **more: Any) -> Outcome:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(bench, "measure", breaking)
    options = Options(model=folder, policies=("full", "recent", "snap"), budgets=("60",), **SMALL)
    made = Bench(options)
    report = made.run()
    assert made.interrupted and list(report.series["policy"]) == ["full", "recent"]
    assert any(note.startswith("Interrupted") for note in report.notes)
    with pytest.raises(KeyboardInterrupt):
        Bench(options).run()


def test_bars_judge_what_was_run() -> None:
    def row(policy: str, right: int, budget: int = 64, peak: int = 128) -> Row:
        outcome = Outcome(
            budget=budget, limit=128, peak=peak, tokens=512, right=[True] * right + [False] * (20 - right)
        )
        return Row(Subject("own", "own", "" if policy == "full" else "64", policy), [outcome])

    rows = [row("full", 18, 512, 600), row("recent", 4), row("snap", 6), row("keydiff", 5), row("episodic", 15)]
    values, claims = judged(rows)
    verdicts = {claim.id: claim.judge(values) for claim in claims}
    assert all(one.passed for one in verdicts.values()) and len(verdicts) == 3
    assert verdicts["episodic-over-best"].value == pytest.approx(2.5)
    assert verdicts["episodic-over-full"].value == pytest.approx(15 / 18)
    rows[3] = row("keydiff", 11, peak=129)
    values, claims = judged(rows)
    assert [claim.id for claim in claims if not claim.judge(values).passed] == ["peak", "episodic-over-best"]
    # Other budgets, missing baselines or other questions: no verdict.
    assert [claim.id for claim in judged(rows[:4])[1]] == ["peak"]
    assert [claim.id for claim in judged([rows[0], rows[1], rows[4]])[1]] == ["peak", "episodic-over-full"]
    assert [claim.id for claim in judged([row("full", 18, 512), row("episodic", 9, budget=256)])[1]] == ["peak"]
    rows[0].outcomes[0].right.pop()
    assert "episodic-over-full" not in [claim.id for claim in judged(rows)[1]]
    low, high = wilson(15, 20)
    assert 0.5 < low < 0.75 < high < 0.9 and wilson(0, 0) == (0.0, 1.0)


def test_budgets_in_tokens_parts_and_bytes() -> None:
    def size() -> tuple[float, float]:
        return 100.0, 1000.0

    assert Budget.parse("512").settle(4000, None, 40, size) == (512, 512)
    assert Budget.parse("8x").settle(4000, 96, 40, size) == (500, 96)
    assert Budget.parse("16").settle(4000, None, 40, size) == (16, 40)
    assert Budget.parse("51kB").settle(4000, None, 40, size) == (250, 250)
    assert Budget.parse("51kB").settle(4000, 100, 40, size) == (400, 100)
    for wrong in ("", "x", "few", "-3", "0", "0.5x", "nanx", "1.5"):
        with pytest.raises(UsageError):
            Budget.parse(wrong)


def test_codecs_by_name_and_what_compares_texts(empty_home: Path) -> None:
    assert {"plain", "int8"} <= set(codecs()) and rewriting("own", "own") is None
    embed, name = embedding(None)  # no model is here
    assert isinstance(embed, Lexical) and "lexical" in name and "pull minilm" in name
    with pytest.raises(OrchardError):
        embedding("minilm")


def test_fitted_codecs_belong_to_their_model(folder: str, tmp_path: Path) -> None:
    decoder = opened(folder, "own", "own").decoder
    layers: list[Any] = decoder.config.complete().stack.layers
    mixer, files = layers[0].mixer, {name: tmp_path / name for name in ("mine", "another's", "missing")}
    books = random_books(mixer.kv_heads, FitCodebooks(file="").rounds_of(mixer.head_dim), words=16, dim=mixer.head_dim)
    for name, whose in (("mine", fingerprint(decoder)), ("another's", "another")):
        write_books(files[name], dict.fromkeys(range(len(layers)), books), model=whose)
    some = Options(model=folder, policies=("recent",), budgets=("64",), **SMALL)
    mine = f"kv-commvq:file={files['mine']}"
    report = Bench(replace(some, codecs=("own", "int4", mine))).run()
    size = [report[f"recent 64{way} bytes"] for way in (f" {mine}", " int4", "")]
    assert size == sorted(size) and report["peak over budget and block"] <= 1.0
    assert any("torch" in note and "commvq" in note for note in report.notes)
    for name in ("another's", "missing"):
        with pytest.raises(BadFile) as caught:
            Bench(replace(some, codecs=(f"kv-commvq:file={files[name]}",))).run()
        assert "orchard compress" in caught.value.hint
    assert named("own,int8") == ("own", "int8") and named("kv-commvq:file=a,bits=1") == ("kv-commvq:file=a,bits=1",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"codecs": ("rtn:bits=4",)},
        {"policies": ("luck",)},
        {"budgets": ("luck",)},
        {"codecs": ("luck",)},
        {"owners": ("luck",)},
        {"owners": ("rtn",)},
        {"owners": ("share-kv:last=99",)},
        {"tasks": ("luck",)},
        {"tasks": ("locomo:/nowhere.json",)},
        {"tasks": ()},
        {"budgets": ()},
        {"budgets": ("4",)},
        {"block": 2},
        {"talks": 0},
    ],
    ids=str,
)
def test_bad_input(wrong: dict[str, Any], folder: str) -> None:
    options = replace(Options(model=folder, policies=("recent",), budgets=("64",), **SMALL), **wrong)
    with pytest.raises(OrchardError) as caught:
        Bench(options).run()
    assert caught.value.hint


def test_saving_needs_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        run_and_save(Options(), save=True, target=tmp_path / "none" / "memory.json")


def test_a_chart_of_nothing_much(folder: str) -> None:
    report = Bench(Options(model=folder, policies=("full",), **SMALL)).run()
    assert list(lines_of(report)) == [("full", "")]
    assert ElementTree.fromstring(curves(report)).tag.endswith("svg") and not report.claims
    assert set(POLICIES) == {"full", "recent", "snap", "keydiff", "kvzip", "episodic"}
