"""What a token's vocabulary entry means in bytes. Three spellings exist in language models:

- *byte-level* (GPT-2 and its kin): each byte is one printable character;
- *pieces* (SentencePiece): plain text with U+2581 for a space, and `<0x0A>`-like entries for single bytes;
- anything else (WordPiece ...): only the tokenizer's own decoder knows.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Literal

from orchard.core.frozen import frozen

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_of_character() -> dict[str, int]:
    """The GPT-2 table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@cache
def _latin_of_character() -> dict[int, str]:
    """The same table for `str.translate`; other characters of Latin-1 become one that has no byte."""
    known = {ord(character): chr(byte) for character, byte in byte_of_character().items()}
    return dict.fromkeys(range(256), "\uffff") | known


@frozen
class Spelling:
    kind: Literal["byte-level", "pieces", "other"]
    strip_start: int = 0  # spaces dropped at the very start of decoded text
    drop_first_marks: bool = False  # the first token loses all its space marks
    byte_pieces: bool = False

    def piece_byte(self, token: str) -> int | None:
        """The byte that a `<0xNN>` entry stands for."""
        match = _BYTE_PIECE.fullmatch(token) if self.byte_pieces else None
        return int(match[1], 16) if match else None

    def bytes_of(self, token: str) -> bytes:
        if self.kind == "byte-level":
            try:
                return token.translate(_latin_of_character()).encode("latin-1")
            except UnicodeEncodeError:  # a character that stands for no byte: the entry is plain text
                return token.encode()
        byte = self.piece_byte(token)
        return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])


def spelling_of(decoder: Any) -> Spelling:
    """Read the spelling off the `tokenizers` decoder object."""
    if decoder is None:
        return Spelling("other")
    state = decoder.__getstate__()
    tree = json.loads(state)
    steps = tree["decoders"] if tree.get("type") == "Sequence" else [tree]
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Spelling("byte-level")
    if names == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        return Spelling("pieces", drop_first_marks=steps[0].get("prepend_scheme") != "never")
    if names in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        mark = replace.get("pattern") == {"String": SPACE_MARK} and replace.get("content") == " "
        if mark and strip.get("content") == " " and strip.get("stop") == 0:
            return Spelling("pieces", strip_start=int(strip.get("start", 0)), byte_pieces=True)
    return Spelling("other")
