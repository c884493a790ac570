"""Text streamed token by token is the text decoded at once, and nothing that was handed out changes later."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from orchard.text import StreamDecoder, Tokenizer
from tests.text.tiny_vocabularies import TEXTS, byte_level, gguf_of_byte_level, gguf_of_pieces


def other_decoder(decoder: object) -> Tokenizer:
    from dataclasses import replace

    from orchard.text.from_gguf import load_gguf

    loaded = load_gguf(gguf_of_pieces())
    backend = tokenizers.Tokenizer.from_str(loaded.backend.to_str())
    backend.decoder = decoder
    return Tokenizer(replace(loaded, backend=backend))


TOKENIZERS = {
    "byte-level": Tokenizer.from_gguf(gguf_of_byte_level(byte_level(), "gpt-2")),
    "pieces": Tokenizer.from_gguf(gguf_of_pieces()),
    "pieces without prefix": Tokenizer.from_gguf(gguf_of_pieces(False)),
    "metaspace": other_decoder(decoders.Metaspace()),
    "metaspace, never": other_decoder(decoders.Metaspace(prepend_scheme="never")),
    "word pieces": other_decoder(decoders.WordPiece()),
}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join([decoder.push(i) for i in ids]) + decoder.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_any_ids_stream_to_what_they_decode_to(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "pieces"])
@given(st.data())
def test_broken_characters_stream_to_what_they_decode_to(name: str, data: st.DataObject) -> None:
    """Single-byte tokens in any order make every kind of broken UTF-8."""
    tokenizer = TOKENIZERS[name]
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    ids = data.draw(st.lists(st.sampled_from(single), max_size=12))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.one_of(st.text(), st.sampled_from(TEXTS)))
def test_real_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in tokenizer.encode("the 😀 fox")]
    assert "".join(pieces) == "the 😀 fox" and decoder.finish() == ""
    assert pieces[0] != "" and "\ufffd" not in "".join(pieces)


def test_control_tokens_are_left_out() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert streamed(tokenizer, [*tokenizer.encode("a"), *tokenizer.eos_ids]) == "a"
