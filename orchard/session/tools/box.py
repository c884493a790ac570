"""The tools of a session: told to the model together, called one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchard.core.errors import UsageError
from orchard.session.errors import ToolCallError
from orchard.session.tools.entry import Entry, tool_of
from orchard.session.tools.errors import BadToolError, UnknownToolError
from orchard.session.tools.results import error_text, text_of
from orchard.session.tools.running import RunAsync, Running
from orchard.session.turn import ToolSpec

if TYPE_CHECKING:
    from orchard.session.schema import GeneratedContent


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `content` is what the model reads, also of an `error`; `value` is what the tool answered."""

    content: str
    value: Any = None
    error: ToolCallError | None = None


class ToolBox:
    """Tools by name. What a tool does wrong is in the result of its call and never raised."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        if isinstance(tools, (str, bytes)) or not isinstance(tools, Iterable):
            raise BadToolError("tools are not a list", hint="pass a list of functions and Tool objects")
        self._entries: dict[str, Entry] = {}
        for thing in tools:
            entry = tool_of(thing)
            if entry.name in self._entries:
                hint = "names tell tools apart: give one of them another name"
                raise BadToolError(f"two tools are called {entry.name!r}", hint=hint)
            self._entries[entry.name] = entry
        self._specs = tuple(entry.spec for entry in self._entries.values())

    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model is told of them."""
        return self._specs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"ToolBox({', '.join(self._entries) or 'no tools'})"

    def call(
        self, name: str, arguments_json: str, timeout: float | None = None, *, run_async: RunAsync | None = None
    ) -> ToolResult:
        """Call a tool and wait for it, `timeout` seconds at most. Coroutines run where `run_async` starts them, or in a loop
        of their own."""
        if timeout is not None and not timeout > 0:
            raise UsageError(f"a timeout of {timeout} seconds", hint="use a number above 0, or None to wait")
        try:
            entry = self._entry(name)
            content = _content(entry, arguments_json)
            value = Running(lambda: entry.call(content), f"the tool {name!r}", run_async).result(timeout)
            return ToolResult(text_of(value), value)
        except BaseException as error:  # a tool's own errors can be anything
            if isinstance(error, KeyboardInterrupt) and not _from_tool(error):
                raise  # the person at the keyboard, and not the tool
            failed = ToolCallError(name, error, hint=getattr(error, "hint", "") or "look at `underlying_error`")
            failed.__cause__ = error
            return ToolResult(error_text(error), None, failed)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise UnknownToolError(f"there is no tool called {name!r}", hint=f"tools are: {known}")
        return self._entries[name]


def _content(entry: Entry, arguments_json: str) -> GeneratedContent:
    """The arguments, read and held against the schema. No text at all means no arguments: some endpoints say it so."""
    text = arguments_json if not isinstance(arguments_json, str) or arguments_json.strip() else "{}"
    return entry.schema.read(text)


def _from_tool(error: BaseException) -> bool:
    """Whether an error came up in the tool's own thread."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code is Running._run.__code__:
            return True
        frames = frames.tb_next
    return False
