"""Tokenizers from files and from GGUF metadata equal their references, and text never becomes a control token."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orchard.core.errors import BadFile, MissingTokenizer, UnsupportedFormat, UsageError
from orchard.text import Tokenizer
from orchard.text.pretokenizers import RULES, byte_level_splitter, split_rule
from tests.text.tiny_vocabularies import (
    CONTROL,
    TEXTS,
    byte_level,
    gguf_of_byte_level,
    gguf_of_pieces,
    pieces_by_definition,
)

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(byte_level())
    return path


@cache
def reference(source: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(source))


any_text = st.one_of(
    st.text(), st.lists(st.sampled_from([*TEXTS, "<think>", "the ", "<", "|"]), max_size=6).map("".join)
)
with_control = st.lists(st.one_of(st.sampled_from(CONTROL), st.text(max_size=5)), max_size=8).map("".join)
BYTE_LEVEL = {pre: Tokenizer.from_gguf(gguf_of_byte_level(byte_level(pre), pre)) for pre in ("gpt-2", "smollm")}
PIECES = {prefix: Tokenizer.from_gguf(gguf_of_pieces(prefix)) for prefix in (True, False)}
EVERY = [*BYTE_LEVEL.values(), *PIECES.values()]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
@given(any_text)
def test_byte_level_gguf_equals_the_tokenizer_it_was_made_from(pre: str, text: str) -> None:
    assert BYTE_LEVEL[pre].encode(text) == reference(byte_level(pre)).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("prefix", [True, False])
@given(st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)).filter(lambda text: "think>" not in text))
def test_pieces_gguf_equals_the_definition(prefix: bool, text: str) -> None:
    assert PIECES[prefix].encode(text) == pieces_by_definition(text, prefix)


def test_digits_are_set_apart_only_where_the_name_says_so() -> None:
    assert len(BYTE_LEVEL["smollm"].encode("12345")) == 5
    assert len(BYTE_LEVEL["gpt-2"].encode("12345")) < 5


@pytest.mark.parametrize("text", TEXTS)
def test_file_equals_the_transformers_package(file: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(file, CONFIG)
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert tokenizer.encode(text) == wrapped.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == tokenizer.encode(text, special=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", EVERY)
@given(with_control)
def test_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", EVERY)
def test_control_tokens_are_recognised_on_request(tokenizer: Tokenizer) -> None:
    for text, token_id in tokenizer.control_tokens.items():
        assert tokenizer.encode(f"a{text}b", special=True).count(token_id) == 1
    assert set(tokenizer.control_tokens) >= set(CONTROL) - {"<unk>"}


def test_tokens_that_are_no_control_tokens_stay_whole() -> None:
    for tokenizer in EVERY:
        ids = tokenizer.encode("<think>")
        assert tokenizer.token_text(ids[-1]) == "<think>" and tokenizer.token_bytes(ids[-1]) == b"<think>"


@pytest.mark.parametrize("tokenizer", EVERY)
@given(any_text)
def test_token_bytes_put_together_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert joined == text.encode() or joined == b" " + text.encode() or "think>" in text


@pytest.mark.parametrize("tokenizer", EVERY)
def test_exported_json_reads_back_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    again = Tokenizer.from_file(path, {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token})
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert reference(tokenizer.to_json()).encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert again.control_ids == tokenizer.control_ids and again.add_bos == tokenizer.add_bos
    assert (again.bos_id, again.eos_ids) == (tokenizer.bos_id, tokenizer.eos_ids)


def test_begin_and_end_tokens(file: Path) -> None:
    tokenizer = Tokenizer.from_file(file, CONFIG, generation_config={"eos_token_id": [5, 6]})
    ids = {text: tokenizer.control_tokens[text] for text in CONTROL}
    assert tokenizer.bos_id == ids["<s>"] and tokenizer.add_bos is False
    assert tokenizer.eos_ids == {
        ids["</s>"],
        5,
        6,
        *(ids[t] for t in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")),
    }
    assert tokenizer.encode("a", bos=True) == [ids["<s>"], *tokenizer.encode("a")]
    assert tokenizer.encode("<s>a", special=True, bos=True).count(ids["<s>"]) == 1
    assert PIECES[True].add_bos and not BYTE_LEVEL["gpt-2"].add_bos
    assert tokenizer.decode([ids["<s>"], *tokenizer.encode("a")]) == "a"
    assert tokenizer.decode([ids["<s>"]], skip_special=False) == "<s>"


def test_a_word_that_is_a_control_token_cannot_be_spelled() -> None:
    """Where whole words are looked up before merging, switching recognition off is not enough."""
    metadata = gguf_of_byte_level(byte_level(), "llama-bpe")
    word = CONTROL.index("<|user|>")
    metadata["tokenizer.ggml.tokens"][word] = "hello"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("hello", special=True) == [word]
    assert word not in tokenizer.encode("hello") and tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_merges_that_end_in_a_control_token_are_not_followed() -> None:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2")
    common = metadata["tokenizer.ggml.tokens"].index("Ġthe")
    assert common in Tokenizer.from_gguf(metadata).encode("in the")
    metadata["tokenizer.ggml.token_type"][common] = 3
    tokenizer = Tokenizer.from_gguf(metadata)
    assert common not in tokenizer.encode("in the") and tokenizer.decode(tokenizer.encode("in the")) == "in the"


def test_chat_template_and_its_hash(file: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer.from_file(file, {"chat_template": named}).chat_template == "D"
    tokenizer = Tokenizer.from_file(file, CONFIG)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.template_hash == hashlib.sha256(b"{{ messages }}").hexdigest()
    bare = Tokenizer.from_file(file)
    assert bare.chat_template is None and bare.template_hash is None and bare.bos_id is None


def test_arrays_may_be_numpy() -> None:
    metadata = gguf_of_pieces()
    plain = Tokenizer.from_gguf(metadata).encode("The quick fox")
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"])
    metadata["tokenizer.ggml.tokens"] = np.array(metadata["tokenizer.ggml.tokens"], dtype=object)
    assert Tokenizer.from_gguf(metadata).encode("The quick fox") == plain


@pytest.mark.parametrize("pre", sorted(RULES))
def test_splits_lose_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_of_byte_level(byte_level(), pre))
    for text in TEXTS:
        composed = tokenizer.decode(tokenizer.encode(text))
        assert composed == text or (RULES[pre].nfc and len(composed) < len(text))


_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# The splitting expressions in the models' own tokenizer.json files.
PUBLISHED = {"llama-bpe": _HEAD + r"\p{N}{1,3}" + _TAIL, "qwen2": _HEAD + r"\p{N}" + _TAIL}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_published_splits(pre: str) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(PUBLISHED[pre]), "isolated")
    ours = byte_level_splitter(split_rule(pre))
    for text in TEXTS:
        assert [span for _, span in ours.pre_tokenize_str(text)] == [span for _, span in split.pre_tokenize_str(text)]


def damaged(**changes: Any) -> dict[str, Any]:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2")
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("metadata", "error", "says"),
    [
        ({}, MissingTokenizer, "no tokenizer"),
        ({"tokenizer.ggml.model": "gpt2"}, MissingTokenizer, "no tokenizer"),
        (damaged(model="rwkv"), UnsupportedFormat, "rwkv"),
        (damaged(pre="shiny-new"), UnsupportedFormat, "shiny-new"),
        (damaged(tokens="abc"), BadFile, "tokens"),
        (damaged(tokens=[1, 2]), BadFile, "tokens"),
        (damaged(merges=None), BadFile, "merges"),
        (damaged(merges=["zz yy"]), BadFile, "zz yy"),
        (damaged(merges=["a"]), BadFile, "merge"),
        (damaged(token_type=[1]), BadFile, "one type per token"),
        (damaged(bos_token_id=10**6), BadFile, "bos_token_id"),
        (damaged(bos_token_id=[1]), BadFile, "bos_token_id"),
        (damaged(eos_token_id="one"), BadFile, "eos_token_id"),
        (damaged(eos_token_id=float("nan")), BadFile, "eos_token_id"),
        (gguf_of_pieces() | {"tokenizer.ggml.scores": [1.0]}, BadFile, "score"),
        (gguf_of_pieces() | {"tokenizer.ggml.scores": None}, BadFile, "score"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        Tokenizer.from_gguf(metadata)
    assert caught.value.hint  # type: ignore[attr-defined]


def broken_merge() -> str:
    tree = json.loads(byte_level())
    tree["model"]["merges"].append(["q", "zzz"])
    return json.dumps(tree)


@pytest.mark.parametrize(
    "source", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"type": "BPE"}}', "[" * 100_000, broken_merge()]
)
def test_broken_files_are_refused(tmp_path: Path, source: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(source)
    with pytest.raises(BadFile) as caught:
        Tokenizer.from_file(path)
    assert caught.value.hint


def test_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(MissingTokenizer):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(MissingTokenizer):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(BadFile):
        Tokenizer.from_file(tmp_path / "x.json")


def test_wrong_calls_are_usage_errors() -> None:
    tokenizer = BYTE_LEVEL["gpt-2"]
    for wrong in ("\ud800", 5, None):
        with pytest.raises(UsageError):
            tokenizer.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        tokenizer.decode([-1])
    assert tokenizer.decode([10**6]) == "" and tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("template", [1, [1], {"a": 1}, [{"name": [1], "template": "x"}], [{"name": "default"}], ""])
def test_an_odd_template_is_no_template(template: Any) -> None:
    assert Tokenizer.from_gguf(damaged() | {"tokenizer.chat_template": template}).chat_template is None
