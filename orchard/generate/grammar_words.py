"""A tokenizer's vocabulary in bytes, as llguidance wants it: what a grammar is followed with.

Made once for a tokenizer and kept for as long as the tokenizer is there. It holds on to the tokenizer only weakly, and no
package of tokenizers is needed: the bytes of a token and how a text is cut are known here.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from orchard.text.spelling import byte_of_character
from orchard.text.tokenizer import Tokenizer


class Words:
    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        self.ends = frozenset(tokenizer.eos_ids)
        self.tokenizer = LLTokenizer(
            _Vocabulary(tokenizer),  # type: ignore[arg-type]  # it asks for no more than what this has
            n_vocab=tokenizer.vocab_size,
            eos_token=sorted(self.ends) or None,
            slices=LLTokenizer.json_slices()[1:],  # the first is for spaces between values, of which there are none
        )

    def matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        from orchard.generate.json_schema.lexer import limits

        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits())

    @cached_property
    def only_ends(self) -> np.ndarray:
        """Bits that let nothing but the end tokens through."""
        stays = np.zeros(max(self.ends, default=0) + 1, bool)
        stays[list(self.ends)] = True
        return np.packbits(stays, bitorder="little")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = token_bytes(tokenizer)
        self.special_token_ids = sorted({*tokenizer.skipped_ids, *tokenizer.control_ids, *tokenizer.eos_ids})
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = ref(tokenizer)
        self._single: dict[int, int] = {}

    def __call__(self, text: str) -> list[int]:
        """How the tokenizer cuts a text in the middle of an answer."""
        tokenizer = self._tokenizer()
        ids = tokenizer.encode_piece(text, first=False) if tokenizer is not None else []
        spelled = text.encode()
        if b"".join(self.tokens[token] for token in ids) == spelled:
            return ids
        # A tokenizer that changes what it is given (lower case, a space in front): byte by byte is always right.
        if not self._single:
            special = set(self.special_token_ids)
            self._single = {t[0]: i for i, t in enumerate(self.tokens) if len(t) == 1 and i not in special}
        return [self._single[byte] for byte in spelled if byte in self._single]


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token. Byte-level vocabularies are translated in one go: a call for each token takes five times as
    long, and a person may be waiting."""
    texts = [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)]
    known = byte_of_character()
    whole = "".join(filter(None, texts))
    if tokenizer.spelling.kind != "byte-level" or not known.keys() >= set(whole):
        return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    data = whole.translate({ord(character): byte for character, byte in known.items()}).encode("latin-1")
    out, start = [], 0
    for text in texts:
        end = start + len(text or "")
        out.append(data[start:end])
        start = end
    for token in tokenizer.skipped_ids:
        if token < len(out):
            out[token] = tokenizer.token_bytes(token)  # special tokens are spelled as they are
    return out


_words: WeakKeyDictionary[Tokenizer, Words] = WeakKeyDictionary()
_making = threading.Lock()


def words_of(tokenizer: Tokenizer) -> Words:
    with _making:
        found = _words.get(tokenizer)
        if found is None:
            found = _words[tokenizer] = Words(tokenizer)
        return found
