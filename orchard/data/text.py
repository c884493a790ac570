"""Text files: one document a file, or several split by empty lines or by a separator of one's own.

Streams: a document and a chunk are in memory, never a file. A document longer than `longest` bytes becomes several, cut at
the end of a line where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError
from orchard.data.errors import BadSample, at_least, check_choice
from orchard.data.files import open_at
from orchard.data.order import Permutation
from orchard.data.reader import Cursor, Reader
from orchard.data.source import Row
from orchard.text.tokenizer import Tokenizer

_CHUNK = 1 << 18
_LOOK_BACK = 4096
"""A separator that begins earlier than this is found already."""
_BLANK = re.compile(rb"\r?\n(?:[ \t]{0,1000}\r?\n)+")
_BOM = b"\xef\xbb\xbf"


class Text(Reader):
    """Documents of text files, as rows `{"text": …}`. Documents of white space only are passed over."""

    suffixes = (".txt", ".md", ".text")

    @config
    class Config(BaseConfig):
        paths: str | Sequence[str] = REQUIRED
        """Files, folders, patterns."""
        split: str = "file"
        """`file`: a file is a document; `blank`: documents are separated by empty lines; anything else is a separator."""
        on_bad: str = "stop"
        order: str = "file"
        """`shuffled`: the files in an order of its own every epoch. For documents within files use Shuffle."""
        seed: int = 0
        longest: int = 1 << 20
        """Bytes of a document. Encoding takes some 180 bytes of memory for each."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("order", cfg.order, ("file", "shuffled"))
        at_least("longest", cfg.longest, 64)
        if not cfg.split or len(cfg.split.encode()) > _LOOK_BACK:
            raise ConfigError("split is empty or too long", hint="use file, blank, or a separator: <|endoftext|>")
        self._order: Permutation | None = None
        self._order_of = 0
        super().__init__(cfg.paths, cfg.on_bad, order=cfg.order, seed=cfg.seed, split=cfg.split, longest=cfg.longest)
        self.cfg = cfg
        named = {"file": None, "blank": _BLANK}
        self._between = named[cfg.split] if cfg.split in named else re.compile(re.escape(cfg.split.encode()))

    def _path(self, number: int) -> Path:
        if self.cfg.order == "file":
            return self.files[number]
        if self._order is None or self._order_of != self._epoch:
            self._order = Permutation(len(self.files), self.cfg.seed, "text", self._epoch)
            self._order_of = self._epoch
        return self.files[self._order[number]]

    def _open(self, path: Path, at: list[int] | None) -> Cursor:
        return _Documents(path, at or [0, 1], self._between, self.cfg.longest)


class _Documents:
    """`at`: bytes before the next document, and the number of its first line."""

    def __init__(self, path: Path, at: list[int], between: re.Pattern[bytes] | None, longest: int) -> None:
        self.path, self.at, self.between, self.longest = path, list(at), between, longest
        self.file = open_at(path, at[0])
        self.ahead = b""
        self.start = 0
        self.ended = False

    def take(self) -> Row | None:
        while True:
            place = f"{self.path}:{self.at[1]}"
            beginning = self.at[0] == 0
            found = self._next()
            if found is None:
                return None
            found = found.removeprefix(_BOM) if beginning else found
            if not found.strip():
                continue
            try:
                text = found.decode()
            except UnicodeDecodeError as error:
                raise BadSample(f"not UTF-8 (byte {error.start})", reason="not-utf8", place=place) from None
            return Row({"text": text}, place)

    def _next(self) -> bytes | None:
        """The bytes up to the next separator; None at the end. Where documents end never depends on how far was read ahead,
        or a stream that is taken up again would differ."""
        looked = self.start
        while True:
            match = self.between.search(self.ahead, looked) if self.between else None
            end = match.start() if match else len(self.ahead)
            if end - self.start > self.longest + (0 if match or self.ended else _LOOK_BACK):
                cut = self._cut()
                return self._pass(cut, cut)
            if match and (self.ended or match.end() + _LOOK_BACK <= len(self.ahead)):
                return self._pass(match.start(), match.end())
            if self.ended:
                return self._pass(end, end) if end > self.start else None
            looked = match.start() if match else max(self.start, len(self.ahead) - _LOOK_BACK)
            chunk = self.file.read(_CHUNK)
            self.ended = not chunk
            self.ahead += chunk

    def _cut(self) -> int:
        """After the last line that fits, else after the last whole character."""
        end = self.start + self.longest
        line = self.ahead.rfind(b"\n", self.start, end) + 1
        if line:
            return line
        while self.ahead[end] & 0xC0 == 0x80 and end > self.start + self.longest - 4:
            end -= 1
        return end

    def _pass(self, end: int, after: int) -> bytes:
        found, passed = self.ahead[self.start : end], self.ahead[self.start : after]
        self.at = [self.at[0] + len(passed), self.at[1] + passed.count(b"\n")]
        self.start = after
        if self.start >= _CHUNK:
            self.ahead, self.start = self.ahead[self.start :], 0
        return found

    def close(self) -> None:
        self.file.close()
