"""A tokenizer packed and made again is the same tokenizer, whichever way it was packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.core.errors import BadFile
from orchard.text.chat import chat_ids
from orchard.text.merges import ARRAYS, PAIRS, STARTS, VOCABULARY
from orchard.text.packed import LEFT, RIGHT, WHOLE, pack, unpack
from orchard.text.tokenizer import Tokenizer
from orchard.weights.gguf.reader import GGUFFile
from tests.text.tiny_vocabularies import gguf_of_pieces
from tests.tiny import tiny_gguf, tiny_tokenizer_files

TEXTS = ["", "Hello there", "naïve café 🌲 <|im_end|>", " \t\n x", "0123 the the", "\u0000\ufffd"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with GGUFFile.open(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as file:
        return Tokenizer.from_gguf(file.metadata)


def through_json(facts: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def same(first: Tokenizer, second: Tokenizer) -> None:
    assert first.to_json() == second.to_json()
    for name in ("vocab_size", "control_ids", "bos_id", "eos_id", "eos_ids", "add_bos", "chat_template"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.control_tokens == second.control_tokens and first.added_tokens.keys() == second.added_tokens.keys()
    for text in TEXTS:
        for special in (False, True):
            ids = first.encode(text, special=special)
            assert second.encode(text, special=special) == ids
            assert second.decode(ids) == first.decode(ids)


def test_a_byte_level_tokenizer_becomes_arrays(tiny: Tokenizer) -> None:
    facts, arrays = pack(tiny)
    assert set(arrays) == set(ARRAYS)
    again = unpack(through_json(facts), arrays)
    same(tiny, again)
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    assert chat_ids(again, messages) == chat_ids(tiny, messages)


@pytest.mark.real
def test_the_default_model(smollm2: Path) -> None:
    with GGUFFile.open(smollm2) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    facts, arrays = pack(tokenizer)
    assert set(arrays) == set(ARRAYS)
    same(tokenizer, unpack(through_json(facts), arrays))


def test_a_folder_tokenizer(tmp_path: Path) -> None:
    files = tiny_tokenizer_files(vocab=96)
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", json.loads(files["tokenizer_config.json"]))
    facts, arrays = pack(tokenizer)
    same(tokenizer, unpack(through_json(facts), arrays))


def test_merges_of_another_spelling_stay_pairs_of_ids() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_of_pieces())
    facts, arrays = pack(tokenizer)
    assert set(arrays) == {VOCABULARY, LEFT, RIGHT} and "merges" not in facts
    same(tokenizer, unpack(through_json(facts), arrays))


@pytest.mark.parametrize("change", ["gap", "null", "unigram"])
def test_what_does_not_fit_arrays_keeps_its_json(change: str, tmp_path: Path) -> None:
    tree = json.loads(tiny_tokenizer_files(vocab=96)["tokenizer.json"])
    if change == "gap":
        tree["model"]["vocab"]["far"] = 500
    elif change == "null":
        tree["model"]["vocab"]["\0"] = 96
    else:
        tree["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["<end>", -2.0]]}
        tree["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    facts, arrays = pack(tokenizer)
    assert set(arrays) == {WHOLE}
    same(tokenizer, unpack(through_json(facts), arrays))


def damages(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    count = arrays[PAIRS].size
    return [
        ({}, arrays),
        (facts | {"vocab_size": None}, arrays),
        (facts | {"eos_ids": ["x"]}, arrays),
        (facts | {"eos_ids": 3}, arrays),
        (facts | {"bos_id": -1}, arrays),
        (facts | {"chat_template": 7}, arrays),
        (facts | {"tree": None}, arrays),
        (facts | {"tree": facts["tree"] | {"added_tokens": [{"id": 1}]}}, arrays),
        (facts | {"tree": facts["tree"] | {"pre_tokenizer": {"type": "Nothing"}}}, arrays),
        (facts | {"tree": facts["tree"] | {"model": {"type": "BPE", "surprise": 1}}}, arrays),
        (facts, {}),
        (facts, {WHOLE: np.frombuffer(b"{", np.uint8)}),
        (facts, arrays | {PAIRS: np.full(count, 10**6, np.int64)}),
        (facts, arrays | {PAIRS: np.zeros(count + 1, np.int64)}),
        (facts, arrays | {VOCABULARY: np.array([0xFF, 0xFE], np.uint8)}),
        (facts, arrays | {STARTS: arrays[STARTS][:-1]}),
        (facts, arrays | {PAIRS: arrays[PAIRS][:-1]}),
        (facts | {"merges": {"letters": [1], "expressions": []}}, arrays),
        (facts | {"merges": {"letters": ["1"] * 256, "expressions": []}}, arrays),
        (facts | {"merges": facts["merges"] | {"expressions": ["("]}}, arrays),
        (facts | {"merges": []}, arrays),
    ]


def test_damage_is_told(tiny: Tokenizer) -> None:
    for facts, arrays in damages(*pack(tiny)):
        with pytest.raises(BadFile):
            unpack(facts, arrays).to_json()  # what makes the tokenizer itself
