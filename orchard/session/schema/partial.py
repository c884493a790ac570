"""JSON that is still being written: a parser that takes it piece by piece, and the snapshots of what is there so far.

Each character is looked at once. A text shows as far as it has come, a number when the character after it has, and what has
been shown never goes away again. Parts that are finished are made into Python values once and shared by later snapshots; what
is still open is copied, so a snapshot does not change under its reader.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from orchard.core.frozen import frozen
from orchard.session.schema.content import GeneratedContent, GenerationID
from orchard.session.schema.shapes import NOTHING, Anything, Memo

if TYPE_CHECKING:
    from orchard.session.schema.schema import GenerationSchema

_SPACE = " \t\n\r"
_OF_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_OF_NUMBER = re.compile(r"[-+.0-9eE]*")
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@frozen
class Partial:
    """A snapshot. `content` is typed: an object of the `PartiallyGenerated` twin, a dict, a list, a text; None while nothing
    of it can be shown. `raw` is the same as JSON."""

    content: Any
    raw: GeneratedContent
    complete: bool = False


class GrowingJson:
    """A JSON text that comes in pieces. `root` is the value so far (NOTHING before any), `depth` how many values on the way to
    the end of the text are open, and `changes` counts what has become visible."""

    def __init__(self) -> None:
        self.root: Any = NOTHING
        self.complete = False
        self.broken = False
        """No JSON: whatever comes is left aside."""
        self.changes = 0
        self._open: list[Any] = []
        self._key: str | None = None
        self._state = "value"
        self._text = ""  # of the text, number or word that is being read
        self._escape = ""  # the beginning of an escape that is not whole
        self._high = ""  # the first half of a character of two escapes
        self._is_key = False
        self._word: tuple[str, Any] = ("", None)

    @property
    def depth(self) -> int:
        return len(self._open) + (self._state == "text" and not self._is_key)

    def push(self, delta: str) -> None:
        at = 0
        while at < len(delta) and not self.broken:
            at = getattr(self, f"_in_{self._state}")(delta, at)

    def finish(self) -> None:
        """The text is at its end, which also ends a number that is all of it."""
        if self._state == "number" and not self._open:
            self._end_number()

    # One method for each state; each takes some characters and says where the next begin.

    def _in_value(self, delta: str, at: int) -> int:
        character = delta[at]
        if character in _SPACE:
            return at + 1
        if character == '"':
            self._begin_text(is_key=False)
        elif character in "{[":
            container: Any = {} if character == "{" else []
            self._place(container)
            self._open.append(container)
            self._state = "key_or_end" if character == "{" else "value_or_end"
        elif character in _WORDS:
            self._word, self._text, self._state = _WORDS[character], "", "word"
            return at
        elif character in "-0123456789":
            self._text, self._state = "", "number"
            return at
        else:
            self.broken = True
        return at + 1

    def _in_value_or_end(self, delta: str, at: int) -> int:
        if delta[at] == "]":
            return self._close(at)
        if delta[at] not in _SPACE:
            self._state = "value"
            return at
        return at + 1

    def _in_key_or_end(self, delta: str, at: int) -> int:
        return self._close(at) if delta[at] == "}" else self._in_key(delta, at)

    def _in_key(self, delta: str, at: int) -> int:
        if delta[at] == '"':
            self._begin_text(is_key=True)
        elif delta[at] not in _SPACE:
            self.broken = True
        return at + 1

    def _in_colon(self, delta: str, at: int) -> int:
        if delta[at] == ":":
            self._state = "value"
        elif delta[at] not in _SPACE:
            self.broken = True
        return at + 1

    def _in_after(self, delta: str, at: int) -> int:
        """After a value."""
        character = delta[at]
        if character in _SPACE:
            return at + 1
        inside = self._open[-1] if self._open else None
        if character == "," and inside is not None:
            self._state = "key" if isinstance(inside, dict) else "value"
            return at + 1
        if inside is not None and character == ("}" if isinstance(inside, dict) else "]"):
            return self._close(at)
        self.broken = True
        return at + 1

    def _in_word(self, delta: str, at: int) -> int:
        word, value = self._word
        taken = delta[at : at + len(word) - len(self._text)]
        self._text += taken
        if not word.startswith(self._text):
            self.broken = True
        elif self._text == word:
            self._place(value)
            self._after_value()
        return at + len(taken)

    def _in_number(self, delta: str, at: int) -> int:
        found = _OF_NUMBER.match(delta, at)
        assert found is not None
        self._text += found.group()
        if found.end() < len(delta):
            self._end_number()
        return found.end()

    def _end_number(self) -> None:
        try:
            self._place(json.loads(self._text))
            self._after_value()
        except ValueError:
            self.broken = True

    def _in_text(self, delta: str, at: int) -> int:
        if self._escape:
            return self._in_escape(delta, at)
        found = _OF_TEXT.match(delta, at)
        assert found is not None
        at = found.end()
        if found.group():
            self._more_text(found.group())
        if at == len(delta):
            return at
        if delta[at] == "\\":
            self._escape = "\\"
        elif delta[at] == '"':
            self._end_text()
        else:
            self.broken = True  # a control character
        return at + 1

    def _in_escape(self, delta: str, at: int) -> int:
        self._escape += delta[at]
        kind = self._escape[1]
        if kind in _ESCAPES:
            self._more_text(_ESCAPES[kind])
        elif kind != "u" or (len(self._escape) > 2 and delta[at] not in "0123456789abcdefABCDEF"):
            self.broken = True
            return at + 1
        elif len(self._escape) < 6:
            return at + 1
        else:
            self._escaped(int(self._escape[2:], 16))
        self._escape = ""
        return at + 1

    def _escaped(self, code: int) -> None:
        if self._high and 0xDC00 <= code < 0xE000:
            code = 0x10000 + ((ord(self._high) - 0xD800) << 10) + (code - 0xDC00)
            self._high = ""
            self._more_text(chr(code))
        elif 0xD800 <= code < 0xDC00:
            self._more_text("")
            self._high = chr(code)
        else:
            self._more_text(chr(code))

    def _begin_text(self, *, is_key: bool) -> None:
        self._text, self._escape, self._high, self._is_key, self._state = "", "", "", is_key, "text"
        if not is_key:
            self._place("")

    def _more_text(self, more: str) -> None:
        self._text += self._high + more
        self._high = ""
        if not self._is_key:
            self._replace(self._text)

    def _end_text(self) -> None:
        self._more_text("")
        if self._is_key:
            self._key, self._state = self._text, "colon"
        else:
            self._after_value()

    def _place(self, value: Any) -> None:
        """Put a new value where it belongs."""
        self.changes += 1
        if not self._open:
            self.root = value
        elif isinstance(self._open[-1], list):
            self._open[-1].append(value)
        else:
            self._open[-1][self._key] = value

    def _replace(self, value: str) -> None:
        """Put more of a text in the place of less."""
        if self._open and isinstance(self._open[-1], list):
            self._open[-1].pop()
        self._place(value)

    def _close(self, at: int) -> int:
        self._open.pop()
        self._after_value()
        return at + 1

    def _after_value(self) -> None:
        self.changes += 1
        self._state = "after"
        self.complete = not self._open


class PartialReader:
    """Snapshots of one answer, in the types of a schema."""

    def __init__(self, schema: GenerationSchema) -> None:
        self._shape = schema.shape
        self._json = GrowingJson()
        self._seen = 0
        self._typed: Memo = {}
        self._anything = Anything()
        self._id = GenerationID()
        self.latest: Partial | None = None

    def push(self, delta: str) -> Partial | None:
        """The next snapshot; None where this piece makes nothing new visible."""
        self._json.push(delta)
        return self._snapshot()

    def finish(self) -> Partial | None:
        """The last snapshot. It is complete where the JSON is."""
        self._json.finish()
        self._snapshot()
        return self.latest

    def _snapshot(self) -> Partial | None:
        grown = self._json
        if grown.changes == self._seen or grown.root is NOTHING:
            return None
        self._seen = grown.changes
        try:
            raw = self._anything.grow(grown.root, grown.depth, {})
            content = self._shape.grow(grown.root, grown.depth, self._typed)
        except RecursionError:  # nested deeper than Python goes: the answer goes on, without snapshots
            return None
        if hasattr(content, "id") and isinstance(content.id, GenerationID):
            content.id = self._id
        content = None if content is NOTHING else content
        self.latest = Partial(content, GeneratedContent.made(raw, complete=grown.complete, id=self._id), grown.complete)
        return self.latest
