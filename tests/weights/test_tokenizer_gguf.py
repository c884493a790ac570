"""Tokenizers as GGUF keys: what is written is read back as the same tokenizer, and what has no words there is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import UnsupportedFormat
from orchard.text.pretokenizers import RULES, byte_level_splitter
from orchard.text.to_gguf import gguf_metadata
from orchard.text.tokenizer import Tokenizer
from tests.text.tiny_vocabularies import CONTROL, TEXTS, byte_level, gguf_of_byte_level, gguf_of_pieces

CONFIG = {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}


def from_tree(tree: dict[str, Any], folder: Path, **facts: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    return Tokenizer.from_file(folder / "tokenizer.json", {**CONFIG, **facts})


def again(tokenizer: Tokenizer, rows: int | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(tokenizer, rows or tokenizer.vocab_size))


def assert_same(ours: Tokenizer, theirs: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, special=True, bos=True) == theirs.encode(text, special=True, bos=True), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    for fact in ("bos_id", "eos_id", "eos_ids", "add_bos", "control_ids", "chat_template"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact


LOOKALIKES = [*TEXTS, "a <think> b</think>", "<|im_start|>system\n<|im_end|> <s>", " ".join(CONTROL)]


@pytest.mark.parametrize("name", RULES)
def test_every_splitting_rule_that_has_a_name(name: str, tmp_path: Path) -> None:
    tree = json.loads(byte_level())
    rule = RULES[name]
    tree["pre_tokenizer"] = json.loads(byte_level_splitter(rule).__getstate__())
    tree["model"]["ignore_merges"] = rule.ignore_merges
    tree["normalizer"] = {"type": "NFC"} if rule.nfc else None
    source = from_tree(tree, tmp_path)
    keys = gguf_metadata(source, source.vocab_size)
    assert RULES[keys["tokenizer.ggml.pre"]] == rule
    assert_same(source, Tokenizer.from_gguf(keys), LOOKALIKES)


def test_the_name_that_most_readers_know_is_written(tmp_path: Path) -> None:
    for name in ("gpt-2", "smollm"):
        source = from_tree(json.loads(byte_level(name)), tmp_path)
        assert gguf_metadata(source, source.vocab_size)["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_entries_keep_their_merges(prefix: bool, tmp_path: Path) -> None:
    source = from_tree(json.loads(Tokenizer.from_gguf(gguf_of_pieces(prefix)).to_json()), tmp_path, unk_token="<unk>")
    keys = gguf_metadata(source, source.vocab_size)
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert_same(source, Tokenizer.from_gguf(keys), LOOKALIKES)


def test_gemmas_way_with_merges_that_no_scores_give(tmp_path: Path) -> None:
    tree = json.loads(Tokenizer.from_gguf(gguf_of_pieces(False)).to_json())
    merges = tree["model"]["merges"]
    merges[3], merges[40] = merges[40], merges[3]
    tree["model"]["merges"] = [merge for merge in merges if merge != merges[10]]
    tree["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    source = from_tree(tree, tmp_path)
    keys = gguf_metadata(source, source.vocab_size)
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert_same(source, Tokenizer.from_gguf(keys), LOOKALIKES)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_gives_the_same_tokens(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not hasattr(test_any_text_gives_the_same_tokens, "made"):
        folder = tmp_path_factory.mktemp("made")
        trees = [json.loads(byte_level("smollm")), json.loads(Tokenizer.from_gguf(gguf_of_pieces()).to_json())]
        made = [from_tree(tree, folder / str(number)) for number, tree in enumerate(trees)]
        test_any_text_gives_the_same_tokens.made = [(each, again(each)) for each in made]  # type: ignore[attr-defined]
    for ours, theirs in test_any_text_gives_the_same_tokens.made:  # type: ignore[attr-defined]
        assert ours.encode(text) == theirs.encode(text)


def test_rows_without_an_entry_get_one_that_nothing_becomes(tmp_path: Path) -> None:
    source = from_tree(json.loads(byte_level()), tmp_path)
    rows = source.vocab_size + 3
    keys = gguf_metadata(source, rows)
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == rows
    assert keys["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert_same(source, Tokenizer.from_gguf(keys), [*LOOKALIKES, f"[PAD{rows - 1}]"])
    with pytest.raises(UnsupportedFormat, match="entries for an embedding of"):
        gguf_metadata(source, source.vocab_size - 1)


def test_other_ids_that_end_an_answer(tmp_path: Path) -> None:
    tree = json.loads(byte_level())
    ids = {text: CONTROL.index(text) for text in ("[INST]", "[/INST]", "<bos>")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")

    def made(*ends: str) -> Tokenizer:
        generation = {"eos_token_id": [ids[text] for text in ends]}
        return Tokenizer.from_file(tmp_path / "tokenizer.json", CONFIG, None, generation)

    assert_same(made("[INST]", "[/INST]"), again(made("[INST]", "[/INST]")), ["x"])
    with pytest.raises(UnsupportedFormat, match="3 ids that end an answer"):
        again(made("[INST]", "[/INST]", "<bos>"))


def test_there_and_back_from_a_gguf_file() -> None:
    source = Tokenizer.from_gguf(gguf_of_byte_level(byte_level("smollm"), "smollm"))
    assert_same(source, again(source), LOOKALIKES)


def _unigram(tree: dict[str, Any]) -> None:
    tree["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
    tree["added_tokens"] = []


def _word_piece(tree: dict[str, Any]) -> None:
    vocab = {"[UNK]": 0, "a": 1}
    tree["model"] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocab,
    }
    tree["added_tokens"] = []


def _strips(tree: dict[str, Any]) -> None:
    tree["added_tokens"][3]["rstrip"] = True


def _lowers(tree: dict[str, Any]) -> None:
    tree["normalizer"] = {"type": "Lowercase"}


def _splits(tree: dict[str, Any]) -> None:
    tree["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"})


def _expression(tree: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}


def _prefix_space(tree: dict[str, Any]) -> None:
    tree["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def _plain_decoder(tree: dict[str, Any]) -> None:
    tree["decoder"] = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_unigram, "a vocabulary of type Unigram"),
        (_word_piece, "a vocabulary of type WordPiece"),
        (_strips, "rstrip of the token '<|im_start|>'"),
        (_lowers, "the normalizer Lowercase"),
        (_splits, "a splitting rule without a name there: Whitespace, ByteLevel"),
        (_expression, "a splitting rule without a name there: Split, ByteLevel"),
        (_prefix_space, "a splitting rule without a name"),
        (_plain_decoder, "neither bytes nor SentencePiece's"),
    ],
)
def test_what_has_no_words_there_is_refused_by_name(change: Any, words: str, tmp_path: Path) -> None:
    tree = json.loads(byte_level())
    change(tree)
    source = from_tree(tree, tmp_path, eos_token=None, bos_token=None)
    with pytest.raises(UnsupportedFormat) as caught:
        gguf_metadata(source, source.vocab_size)
    assert words in caught.value.message and caught.value.hint


def test_a_space_before_some_words_only_is_refused(tmp_path: Path) -> None:
    tree = json.loads(Tokenizer.from_gguf(gguf_of_pieces(False)).to_json())
    tree["normalizer"] = None
    for scheme in ("first", "always"):
        tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        source = from_tree(tree, tmp_path)
        with pytest.raises(UnsupportedFormat, match=f"prepend_scheme '{scheme}'"):
            gguf_metadata(source, source.vocab_size)
    tree["pre_tokenizer"]["prepend_scheme"] = "never"
    source = from_tree(tree, tmp_path)
    assert_same(source, again(source), LOOKALIKES)
