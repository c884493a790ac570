"""Bytes as tokens: the quick way and the package's own give the same ids, and every text comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.text.byte_tokens import BEGIN, END, VOCAB, byte_tokenizer
from orchard.text.to_gguf import gguf_metadata
from orchard.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
SLOW = Tokenizer(TOKENIZER._loaded)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_token_is_a_byte(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert bytes(ids) == text.encode() and ids == SLOW.encode(text) and TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text, bos=True) == [256, *ids] and TOKENIZER.encode_piece(text, first=False) == ids


def test_control_tokens_cannot_be_spelled() -> None:
    assert TOKENIZER.encode(BEGIN + END) == list((BEGIN + END).encode())
    assert TOKENIZER.encode(BEGIN + "a" + END, special=True) == [256, 97, 257]
    assert TOKENIZER.control_ids == {256, 257} and TOKENIZER.vocab_size == VOCAB


def test_bad_texts_are_refused_as_elsewhere() -> None:
    for bad in ("\udcff", 3):
        try:
            TOKENIZER.encode(bad)  # type: ignore[arg-type]
        except UsageError:
            continue
        raise AssertionError(bad)


def test_a_gguf_file_can_hold_it() -> None:
    facts = gguf_metadata(TOKENIZER, VOCAB)
    again = Tokenizer.from_gguf(facts)
    assert again.encode("Straße 3\n") == TOKENIZER.encode("Straße 3\n") and again.eos_ids >= {257}
