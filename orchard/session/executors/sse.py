"""Server-sent events out of a stream of bytes, however the network cuts it.

The format is that of the WHATWG HTML standard (9.2.6): lines that end in LF, CR or CRLF; `data:` lines of one event are
joined by line feeds; an empty line ends the event; a line that begins with a colon is a comment. Other fields (event, id,
retry) mean nothing to a chat stream. What one line and one event may hold is bounded, so that a broken server costs an
error and not the memory.
"""

from __future__ import annotations

from orchard.session.errors import DecodingFailureError

MOST_LINE = 2**20
MOST_EVENT = 2**22
_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Give it bytes with `push`, and take the data of the events that they complete."""

    def __init__(self, *, most_line: int = MOST_LINE, most_event: int = MOST_EVENT) -> None:
        self._most_line, self._most_event = most_line, most_event
        self._line = bytearray()
        self._data: list[bytes] = []
        self._held = 0
        self._after_return = False
        self._first = True

    def push(self, chunk: bytes) -> list[str]:
        """The data of every event that ends in this chunk."""
        if not chunk:
            return []
        if self._after_return and chunk.startswith(b"\n"):  # the second half of a CRLF that was cut
            chunk = chunk[1:]
        self._after_return = chunk.endswith(b"\r")
        found: list[str] = []
        for part in chunk.splitlines(keepends=True):
            ended = part.endswith((b"\n", b"\r"))
            self._line += part.rstrip(b"\r\n") if ended else part
            if len(self._line) > self._most_line:
                raise _too_long("a line", self._most_line)
            if ended:
                found += self._end_line()
        return found

    def finish(self) -> list[str]:
        """What is left when the stream ends without an empty line: one event, or none."""
        found = self._end_line() if self._line else []
        return found or self._end_event()

    def _end_line(self) -> list[str]:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first, line = False, line.removeprefix(_MARK)
        if not line:
            return self._end_event()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._held += len(value) + 1
            if self._held > self._most_event:
                raise _too_long("an event", self._most_event)
        return []

    def _end_event(self) -> list[str]:
        if not self._data:
            return []
        data, self._data, self._held = b"\n".join(self._data), [], 0
        try:
            return [data.decode("utf-8")]
        except UnicodeDecodeError as error:
            raise DecodingFailureError(
                f"the endpoint sent an event that is not UTF-8 (byte {error.start:,})",
                raw=data.decode("utf-8", "replace")[:1000],
                hint="something between here and the endpoint damages its answers; try it without a proxy",
            ) from None


def _too_long(what: str, most: int) -> DecodingFailureError:
    return DecodingFailureError(
        f"the endpoint sent {what} of more than {most:,} bytes",
        hint="check that the address is that of a chat endpoint and not of a file",
    )
