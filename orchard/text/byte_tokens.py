"""A tokenizer without a vocabulary to learn: every byte is a token, and there is one to begin and one to end a text.

For models that are trained from nothing on whatever is at hand. It goes through the `tokenizers` package like any other, so that
a model saved with it is an ordinary folder (and GGUF has words for it: byte-level pairs, of which there are none).
"""

from __future__ import annotations

from orchard.text.loaded import Loaded
from orchard.text.pretokenizers import RULES, byte_level_splitter
from orchard.text.spelling import byte_of_character
from orchard.text.tokenizer import Tokenizer

BEGIN, END = "<|begin|>", "<|end|>"
VOCAB = 258


class ByteTokenizer(Tokenizer):
    """The same ids as the backend's, without asking it: some 100 times as fast."""

    def _safe(self, text: str, later: bool = False) -> list[int]:
        try:
            return list(text.encode())
        except (UnicodeEncodeError, AttributeError):  # what is wrong with it is said there
            return super()._safe(text, later)


def byte_tokenizer() -> Tokenizer:
    """Bytes are tokens 0 to 255, by their own numbers; 256 begins a text and 257 ends it."""
    from tokenizers import AddedToken, decoders
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    backend = Backend(BPE(vocab=dict(byte_of_character()), merges=[]))
    backend.pre_tokenizer = byte_level_splitter(RULES["gpt-2"])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BEGIN, END)])
    return ByteTokenizer(
        Loaded(
            backend=backend,
            vocab_size=VOCAB,
            control_ids=frozenset({256, 257}),
            bos_id=256,
            eos_id=257,
            eos_ids=frozenset({257}),
            add_bos=True,
            chat_template=None,
        )
    )
