"""Token ids to text, one id at a time. Only text that later ids cannot change is handed out, so that the pieces put
together are exactly what `decode` gives for all ids at once.
"""

from __future__ import annotations

import codecs

from orchard.text.spelling import SPACE_MARK
from orchard.text.tokenizer import Tokenizer


class StreamDecoder:
    """`push(id)` returns new text (often empty: half a character is held back), `finish()` what remains.

    Byte-level vocabularies hold back at most one character. SentencePiece vocabularies hold back a run of byte
    entries until it ends, because one bad byte changes how the whole run is shown. Other decoders (WordPiece) have
    no such rule, so everything comes with `finish()`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelling = tokenizer.spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()
        self._held: list[int] = []
        self._started = False
        self._spaces_to_strip = self._spelling.strip_start

    def push(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in tokenizer.skipped_ids:
            return ""
        text = tokenizer.token_text(token_id)
        if text is None:
            return ""
        if self._spelling.kind == "other":
            self._held.append(token_id)
            return ""
        if self._spelling.kind == "byte-level":
            return self._utf8.decode(self._spelling.bytes_of(text))
        byte = self._spelling.piece_byte(text)
        if byte is not None:
            self._run.append(byte)
            return ""
        first, self._started = not self._started, True
        mark = "" if first and self._spelling.drop_first_marks else " "
        return self._stripped(self._end_run() + text.replace(SPACE_MARK, mark))

    def finish(self) -> str:
        if self._spelling.kind == "other":
            return self._tokenizer.decode(self._held)
        if self._spelling.kind == "byte-level":
            return self._utf8.decode(b"", final=True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        """Drop the spaces that the decoder removes at the very start."""
        while text and self._spaces_to_strip:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text, self._spaces_to_strip = text[1:], self._spaces_to_strip - 1
        return text
