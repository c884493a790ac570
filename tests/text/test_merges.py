"""Encoding straight from packed arrays gives what the `tokenizers` package gives, or says that it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.text.merges import LONGEST_WORD, Merges
from orchard.text.packed import pack, unpack
from orchard.text.pretokenizers import RULES
from orchard.text.stream import StreamDecoder
from orchard.text.tokenizer import Tokenizer
from orchard.text.words import Splitter, expressions_of, translated
from tests.text.tiny_vocabularies import TEXTS, byte_level, gguf_of_byte_level, gguf_of_pieces

KNOWN = [chr(c) for c in (*range(0x80), *range(0xA0, 0x130), *range(0x132, 0x17F), *range(0x180, 0x250))]
KNOWN += [*map(chr, range(0x2010, 0x2028)), "€"]
WORDS = [
    "'s",
    "'LL",
    "don't",
    "the",
    " quick",
    "  ",
    "\n\n",
    "\r\n",
    "123",
    "½",
    "é",
    "<|im_end|>",
    "<think>",
    "“x”",
    "\x1c",
]
texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(KNOWN, max_size=12)), max_size=12).map("".join)


@cache
def both(rule: str) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer of the `tokenizers` package, and the same from its arrays."""
    plain = Tokenizer.from_gguf(gguf_of_byte_level(byte_level(), rule))
    facts, arrays = pack(plain)
    return plain, unpack(json.loads(json.dumps(facts)), arrays)


def merges_of(tokenizer: Tokenizer) -> Merges | None:
    return tokenizer._merges


COVERED = [rule for rule in sorted(RULES) if merges_of(both(rule)[1]) is not None]


def test_the_common_rules_are_covered() -> None:
    assert {"gpt-2", "smollm", "llama-bpe", "qwen2"} <= set(COVERED)


@given(st.sampled_from(COVERED), texts)
def test_known_characters_encode_alike(rule: str, text: str) -> None:
    plain, packed = both(rule)
    merges = merges_of(packed)
    assert merges is not None
    ids = merges.encode(text)
    assert ids is None or ids == plain.encode(text)
    assert ids is not None or "<think>" in text  # not a control token: it is cut out of the text
    assert packed.encode(text) == plain.encode(text)
    assert packed.encode_piece(text, first=False) == plain.encode_piece(text, first=False)


@given(st.sampled_from(COVERED), st.text())
def test_any_text_encodes_alike(rule: str, text: str) -> None:
    plain, packed = both(rule)
    assert packed.encode(text) == plain.encode(text)


@given(st.sampled_from(COVERED), st.lists(st.integers(0, 720)), st.booleans())
def test_ids_decode_alike(rule: str, ids: list[int], skip: bool) -> None:
    plain, packed = both(rule)
    assert packed.decode(ids, skip_special=skip) == plain.decode(ids, skip_special=skip)
    first, second = StreamDecoder(plain), StreamDecoder(packed)
    assert [second.push(i) for i in ids] == [first.push(i) for i in ids] and second.finish() == first.finish()
    for token_id in ids:
        assert packed.token_text(token_id) == plain.token_text(token_id)
        assert packed.token_bytes(token_id) == plain.token_bytes(token_id)


@pytest.mark.parametrize("rule", COVERED)
def test_the_same_facts(rule: str) -> None:
    plain, packed = both(rule)
    for text in TEXTS:
        assert packed.encode(text) == plain.encode(text)
    assert packed.control_tokens == plain.control_tokens and packed.skipped_ids == plain.skipped_ids
    assert packed.spelling == plain.spelling and packed.bos_token == plain.bos_token
    for token_id, added in plain.added_tokens.items():
        for name in ("content", "single_word", "lstrip", "rstrip", "normalized", "special"):
            assert getattr(packed.added_tokens[token_id], name) == getattr(added, name)
    for wrong in ([-1], [2**32], ["a"], [1.5]):
        with pytest.raises(UsageError):
            packed.decode(wrong)  # type: ignore[arg-type]
    for text in ("\ud800", None):
        with pytest.raises(UsageError):
            packed.encode(text)  # type: ignore[arg-type]


def test_long_words_are_left_to_the_tokenizer() -> None:
    plain, packed = both("gpt-2")
    merges = merges_of(packed)
    assert merges is not None
    assert merges.encode("a" * LONGEST_WORD) == plain.encode("a" * LONGEST_WORD)
    assert merges.encode("a" * (LONGEST_WORD + 1)) is None
    assert packed.encode("ab" * 3000) == plain.encode("ab" * 3000)


def test_other_spellings_are_not_covered() -> None:
    facts, _ = pack(Tokenizer.from_gguf(gguf_of_pieces()))
    assert "merges" not in facts
    assert expressions_of({"type": "NFKC"}, {"type": "ByteLevel", "add_prefix_space": False}) is None
    assert expressions_of(None, {"type": "ByteLevel", "add_prefix_space": True}) is None
    assert expressions_of(None, {"type": "Whitespace"}) is None
    assert expressions_of(None, None) is None


@pytest.mark.parametrize(
    "expression", [r"\w+", r"\p{Lu}", "a$", "^a", ".", "[[a]]", r"[a&&b]", "a{2}+", "(?i)a", "(?<=a)b", "[", r"[\S]"]
)
def test_unusual_expressions_are_refused(expression: str) -> None:
    assert translated(expression) is None


def test_a_splitter_loses_nothing() -> None:
    for rule in COVERED:
        facts, _ = pack(both(rule)[0])
        splitter = Splitter(facts["merges"]["expressions"])
        for text in TEXTS:
            words = splitter(text)
            assert words is None or "".join(words) == text


def test_an_encoding_brings_in_no_tokenizer() -> None:
    code = """
import sys, json, numpy as np
facts, arrays = json.loads(sys.stdin.read())
from orchard.text.packed import unpack
arrays = {name: np.array(values, kind) for name, (kind, values) in arrays.items()}
tokenizer = unpack(facts, arrays)
print(tokenizer.decode(tokenizer.encode("Hello, naïve world")), "tokenizers" in sys.modules)
print(tokenizer.decode(tokenizer.encode("日本")), "tokenizers" in sys.modules)
"""
    facts, arrays = pack(both("smollm")[0])
    given = json.dumps([facts, {name: [array.dtype.name, array.tolist()] for name, array in arrays.items()}])
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert done.stdout == "Hello, naïve world False\n日本 True\n"
