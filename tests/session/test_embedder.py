"""Texts to vectors on a tiny model: what a text costs, whom it depends on, what is refused, and many threads at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import orchard
from orchard.core.errors import BadFile, Cancelled, ContextOverflow, MissingTokenizer, UsageError
from orchard.session import embedder as module
from orchard.session.embedder import Embedder, batches, load_embedder
from orchard.session.errors import AssetsUnavailableError
from orchard.weights.sentence import MakesNoVectors, WritesNoText
from tests.tiny import tiny_gguf
from tests.tiny_bert import CLS, SEP, TOKENS, VOCAB, tiny_bert, tokenizer_json

TEXTS = st.text(alphabet="abc xyz.1[]", min_size=1, max_size=20)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return load_embedder(tiny_bert(tmp_path_factory.mktemp("embedder") / "tiny"))


def test_vectors_and_tokens(tiny: Embedder) -> None:
    found = tiny.embed(["the cat sleeps", "dog", "the dog barks."])
    assert found.vectors.shape == (3, 32) and found.vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(found.vectors, axis=1), 1, atol=1e-6)
    assert found.tokens == [5, 3, 6] and [tiny.count(text) for text in ("the cat sleeps", "dog")] == [5, 3]
    assert (tiny.dim, tiny.max_tokens) == (32, TOKENS) and "tiny" in repr(tiny)
    again = tiny.embed(["the cat sleeps"]).vectors[0]
    assert np.abs(again - found.vectors[0]).max() < 1e-6 and np.abs(again - found.vectors[1]).max() > 0.01


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=12), data=st.data())
def test_a_text_does_not_depend_on_its_company(tiny: Embedder, texts: list[str], data: st.DataObject) -> None:
    together = tiny.embed(texts).vectors
    order = data.draw(st.permutations(range(len(texts))))
    shuffled = tiny.embed([texts[number] for number in order]).vectors
    for place, number in enumerate(order):
        alone = tiny.embed([texts[number]]).vectors[0]
        assert np.abs(alone - together[number]).max() < 1e-5
        assert np.abs(alone - shuffled[place]).max() < 1e-5


@given(lengths=st.lists(st.integers(1, 512), max_size=200))
def test_batches_hold_every_text_once_and_little_padding(lengths: list[int]) -> None:
    cut = list(batches(lengths))
    assert sorted(number for batch in cut for number in batch) == list(range(len(lengths)))
    padded = 0
    for batch in cut:
        size = max(lengths[number] for number in batch) * len(batch)
        assert size <= module.BATCH_TOKENS
        wasted = size - sum(lengths[number] for number in batch)
        assert wasted <= max(module.CALL_TOKENS, size // 16)
        padded += size
    assert padded <= sum(lengths) * 16 / 15 + module.CALL_TOKENS * len(cut)


def test_the_cost_grows_with_the_tokens_and_not_with_the_longest(
    tiny: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    vectors = tiny.encoder.vectors

    def counted(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        seen.append(ids.numel())
        return vectors(ids, valid)

    monkeypatch.setattr(tiny.encoder, "vectors", counted)
    monkeypatch.setattr(module, "BATCH_TOKENS", 64)
    found = tiny.embed(["a"] * 100 + ["a " * 20] * 3)
    assert sum(seen) <= sum(found.tokens) * 1.1 + module.CALL_TOKENS and max(seen) <= 64


# What is too long, empty, or no text ------------------------------------------------------------------------------------


def test_an_overlong_text_is_refused_with_both_counts(tiny: Embedder) -> None:
    with pytest.raises(ContextOverflow) as caught:
        tiny.embed(["cat", "a " * 30])
    assert (caught.value.tokens, caught.value.limit) == (32, TOKENS)
    assert "32 tokens" in str(caught.value) and "24" in str(caught.value)
    assert "text 1" in caught.value.hint and "8 tokens" in caught.value.hint
    assert tiny.count("a " * 30) == 32
    assert tiny.embed(["a " * 22]).tokens == [TOKENS]


def test_truncation_keeps_the_beginning_and_the_frame(tiny: Embedder) -> None:
    cut = tiny.embed(["cat " + "a " * 60], truncate=True)
    assert cut.tokens == [TOKENS]
    assert np.allclose(cut.vectors, tiny.embed(["cat " + "a " * 21]).vectors, atol=1e-6)
    assert tiny.embed(["cat"], truncate=True).tokens == [3]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "list of texts is empty"),
        ("cat", "a list of texts, not str"),
        (b"cat", "a list of texts, not bytes"),
        (None, "not NoneType"),
        ({"cat"}, "not set"),
        (["cat", ""], "text 1 is empty"),
        ([[]], "text 0 is empty"),
        ([None], "neither a text nor token ids, but NoneType"),
        ([b"cat"], "neither a text nor token ids, but bytes"),
        ([1, 2], "neither a text nor token ids, but int"),
        ([["cat"]], "'cat', which is no token id"),
        ([[1, True]], "True, which is no token id"),
        ([[1, -1]], "-1, which is no token id"),
        ([[len(VOCAB)]], "which is no token id"),
        ([[1.0]], "which is no token id"),
        (["\ud800"], "not valid Unicode"),
    ],
)
def test_what_is_no_text_is_refused(tiny: Embedder, texts: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        tiny.embed(texts)
    assert caught.value.hint


def test_a_text_cannot_spell_control_tokens(tiny: Embedder) -> None:
    assert CLS not in tiny.tokenizer.encode("[CLS]") and tiny.count("[SEP]") > 3
    honest = tiny.embed([[CLS, SEP, SEP]]).vectors  # whoever sends ids may
    assert np.abs(tiny.embed(["[SEP]"]).vectors - honest).max() > 1e-3


@given(text=TEXTS)
def test_token_ids_are_the_text_framed_or_not(tiny: Embedder, text: str) -> None:
    ids = tiny.tokenizer.encode(text)
    framed = [CLS, *ids, SEP]
    forms: list[Any] = [text, framed, tuple(framed)] + ([ids] if ids else [])
    found = tiny.embed(forms)
    assert len(set(found.tokens)) == 1 and np.abs(found.vectors - found.vectors[0]).max() < 1e-6


def test_spaces_alone_are_the_frame(tiny: Embedder) -> None:
    assert tiny.embed([" \n"]).tokens == [2]


# Threads ------------------------------------------------------------------------------------------------------------------


def test_many_threads_get_what_one_would(tiny: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{'cat ' * (number % 15)}{'abcdefg'[number % 7]}" for number in range(40)]
    alone = tiny.embed(texts).vectors
    wrong: list[float] = []
    inside: list[int] = []
    most: list[int] = []
    vectors = tiny.encoder.vectors

    def watched(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        return vectors(ids, valid)

    def work(first: int) -> None:
        for _ in range(5):
            mine = tiny.embed(texts[first:] + texts[:first]).vectors
            wrong.append(float(np.abs(np.roll(mine, first, axis=0) - alone).max()))

    monkeypatch.setattr(tiny.encoder, "vectors", watched)
    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 40, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(wrong) == 40 and max(wrong) < 1e-5
    assert max(most) == 1  # so the memory of one batch is all there is


def test_a_long_list_holds_nobody_up(tiny: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request comes in between the batches of a long one, and not after its last."""
    vectors, done = tiny.encoder.vectors, threading.Event()
    begun = threading.Event()

    def slow(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        begun.set()
        time.sleep(0.005)
        return vectors(ids, valid)

    monkeypatch.setattr(tiny.encoder, "vectors", slow)
    monkeypatch.setattr(module, "BATCH_TOKENS", 3)

    def work() -> None:
        tiny.embed(["cat"] * 200)
        done.set()

    long = threading.Thread(target=work)
    long.start()
    assert begun.wait(10)
    tiny.embed(["dog"])
    assert not done.is_set()
    long.join(60)
    assert done.is_set()


def test_turns_go_in_the_order_of_asking(tiny: Embedder) -> None:
    turns, order = tiny._turns, []

    def ask(name: str) -> None:
        with turns.mine():
            order.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    with turns.mine():
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) < number + 2:
                time.sleep(0.001)
    ask("again")  # whoever just had a turn is the last in line
    for thread in threads:
        thread.join(10)
    assert order == ["a", "b", "c", "again"]


def test_an_interrupted_wait_gives_its_place_back(tiny: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ready: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny._turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.embed(["cat"])
    assert tiny.embed(["cat"]).tokens == [3]  # would wait for ever behind a ticket left behind


def test_a_cancelled_call_stops(tiny: Embedder) -> None:
    cancel = threading.Event()
    assert tiny.embed(["cat"], cancel=cancel).tokens == [3]
    cancel.set()
    with pytest.raises(Cancelled):
        tiny.embed(["cat"], cancel=cancel)


# Loading ------------------------------------------------------------------------------------------------------------------


def test_files_decide_pooling_and_case(tmp_path: Path) -> None:
    first = load_embedder(
        tiny_bert(tmp_path / "first", files={"1_Pooling/config.json": {"pooling_mode_cls_token": True}})
    )
    mean = load_embedder(tiny_bert(tmp_path / "mean"))
    hidden = mean.encoder(torch.tensor([[CLS, VOCAB.index("cat"), SEP]]))[0]
    wanted = torch.nn.functional.normalize(hidden[0], dim=-1).detach().numpy()
    assert np.allclose(first.embed(["cat"]).vectors[0], wanted, atol=1e-6)
    assert np.abs(mean.embed(["cat"]).vectors[0] - wanted).max() > 1e-3
    keeps_case = tokenizer_json(normalizer=None)
    upper = load_embedder(tiny_bert(tmp_path / "upper", files={"tokenizer.json": keeps_case}))
    limits = {"max_seq_length": TOKENS, "do_lower_case": True}
    files = {"tokenizer.json": keeps_case, "sentence_bert_config.json": limits}
    lower = load_embedder(tiny_bert(tmp_path / "lower", files=files))
    assert np.allclose(lower.embed(["CAT"]).vectors, lower.embed(["cat"]).vectors)
    assert not np.allclose(upper.embed(["CAT"]).vectors, upper.embed(["cat"]).vectors)


def test_a_tokenizer_without_a_rule_for_the_frame(tmp_path: Path) -> None:
    bare = load_embedder(tiny_bert(tmp_path / "m", files={"tokenizer.json": tokenizer_json(post_processor=None)}))
    assert bare.count("cat") == 3


@pytest.mark.parametrize(
    ("files", "config", "error", "words"),
    [
        ({"tokenizer.json": None}, {}, MissingTokenizer, "no tokenizer.json"),
        ({"tokenizer.json": b"{}"}, {}, BadFile, "not a tokenizer"),
        ({"tokenizer.json": {"model": {"type": "WordPiece"}}}, {}, BadFile, "cannot be used"),
        ({}, {"vocab_size": 10}, BadFile, "the model 10"),
        ({"sentence_bert_config.json": {"max_seq_length": 2}}, {}, BadFile, "no room for a text"),
    ],
)
def test_folders_that_do_not_fit(
    files: dict[str, Any], config: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        load_embedder(tiny_bert(tmp_path / "m", files=files, config=config))


def test_the_two_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    with pytest.raises(WritesNoText, match="it does not write"):
        orchard.load(tiny_bert(tmp_path / "m"))
    with pytest.raises(MakesNoVectors, match="writes text"):
        orchard.embedder(tiny_gguf(tmp_path / "x.gguf"))


def test_forbidden_models_stay_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHARD_FORBID_MODELS", "1")
    with pytest.raises(AssetsUnavailableError, match="may not be loaded"):
        orchard.embedder(tiny_bert(tmp_path / "m"))


def test_the_names_cost_nothing_until_used() -> None:
    program = "import sys, orchard; orchard.Embedder; assert 'torch' not in sys.modules; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert orchard.embedder is load_embedder and orchard.Embedder is Embedder
