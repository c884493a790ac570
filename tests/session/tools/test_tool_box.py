"""A tool box: names that are told apart, calls whose errors never escape, results of any type."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.session.errors import DecodingFailureError, TimedOutError, ToolCallError
from orchard.session.tools import BadToolError, ToolBox
from orchard.session.tools.errors import UnknownToolError
from orchard.session.tools.results import text_of


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_specs_in_order_and_read_once() -> None:
    def other() -> None: ...

    box = ToolBox([add, other])
    assert [spec.name for spec in box.specs()] == ["add", "other"] == list(box.names)
    assert box.specs() is box.specs()
    assert len(box) == 2 and "add" in box and "nothing" not in box and repr(box) == "ToolBox(add, other)"
    assert [entry.source for entry in box] == [add, other]
    assert ToolBox().specs() == () and len(ToolBox()) == 0


def test_equal_names_are_refused() -> None:
    with pytest.raises(BadToolError, match="two tools are called 'add'"):
        ToolBox([add, add])


@pytest.mark.parametrize("name", ["", " a", "a\nb", "required", "allowed", "x" * 200])
def test_names_that_cannot_be_one(name: str) -> None:
    def tool() -> None: ...

    tool.__name__ = name
    with pytest.raises(BadToolError):
        ToolBox([tool])


@pytest.mark.parametrize("tools", ["add", 3, b"x"])
def test_tools_are_a_list(tools: Any) -> None:
    with pytest.raises(BadToolError):
        ToolBox(tools)


def test_a_call_gives_text_and_value() -> None:
    result = ToolBox([add]).call("add", '{"a": 1, "b": 2}')
    assert (result.content, result.value, result.error) == ("3", 3, None)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("nothing", "{}", UnknownToolError),
        ("add", "{", DecodingFailureError),
        ("add", "[1]", DecodingFailureError),
        ("add", '{"a": 1}', DecodingFailureError),
        ("add", '{"a": 1, "b": "2"}', DecodingFailureError),
        ("add", '{"a": 1, "b": 2, "c": 3}', DecodingFailureError),
        ("add", '{"a": 1, "b": NaN}', DecodingFailureError),
        ("add", "", DecodingFailureError),
        ("add", "[" * 100_000, DecodingFailureError),
    ],
)
def test_calls_that_cannot_be_made(name: str, arguments: str, kind: type) -> None:
    result = ToolBox([add]).call(name, arguments)
    assert isinstance(result.error, ToolCallError)
    assert isinstance(result.error.underlying_error, kind)
    assert result.error.tool_name == name and result.error.hint
    assert result.content.startswith("Tool error: ") and result.value is None


def test_no_text_means_no_arguments() -> None:
    def now() -> str:
        return "noon"

    assert ToolBox([now]).call("now", " ").value == "noon"


@pytest.mark.parametrize(
    "error", [ValueError("no such city"), KeyError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_no_error_of_a_tool_escapes(error: BaseException, is_async: bool) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        await asyncio.sleep(0)
        raise error

    tool = fails_later if is_async else fails
    result = ToolBox([tool]).call(tool.__name__, "{}")
    assert isinstance(result.error, ToolCallError)
    assert result.error.tool_name == tool.__name__
    if isinstance(error, Exception):
        assert result.error.underlying_error is error and result.error.__cause__ is error
        assert str(error) in result.content


def test_an_error_without_words_is_named() -> None:
    def fails() -> None:
        raise ValueError

    assert ToolBox([fails]).call("fails", "{}").content == "Tool error: ValueError"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_never_returns_is_given_up(is_async: bool) -> None:
    over, ended = threading.Event(), threading.Event()

    def never() -> None:
        over.wait(20)

    async def never_async() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            ended.set()

    tool = never_async if is_async else never
    began = time.monotonic()
    result = ToolBox([tool]).call(tool.__name__, "{}", 0.1)
    assert time.monotonic() - began < 5
    assert result.error is not None and isinstance(result.error.underlying_error, TimedOutError)
    over.set()
    if is_async:
        assert ended.wait(5)  # a coroutine is not only left alone but ended


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_impossible_timeouts(timeout: float) -> None:
    with pytest.raises(UsageError):
        ToolBox([add]).call("add", '{"a": 1, "b": 2}', timeout)


def test_a_tool_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    ToolBox([add]).call("add", '{"a": 1, "b": 2}')
    time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def test_coroutines_run_where_they_are_told_to(loop: asyncio.AbstractEventLoop) -> None:
    async def where() -> bool:
        return asyncio.get_running_loop() is loop

    def start(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    box = ToolBox([where])
    assert box.call("where", "{}", 5, run_async=start).value is True
    assert box.call("where", "{}", 5).value is False


def test_a_coroutine_in_another_loop_is_given_up_too(loop: asyncio.AbstractEventLoop) -> None:
    ended = threading.Event()

    async def never() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            ended.set()

    result = ToolBox([never]).call("never", "{}", 0.1, run_async=lambda it: asyncio.run_coroutine_threadsafe(it, loop))
    assert result.error is not None and isinstance(result.error.underlying_error, TimedOutError)
    assert ended.wait(5)


def test_tools_see_the_callers_context_variables() -> None:
    import contextvars

    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    def who() -> str:
        return user.get()

    user.set("ada")
    assert ToolBox([who]).call("who", "{}").value == "ada"


def test_calls_side_by_side() -> None:
    meeting = threading.Barrier(4)

    def meet(number: int) -> int:
        meeting.wait(10)
        return number

    box, got = ToolBox([meet]), []
    threads = [
        threading.Thread(target=lambda n=n: got.append(box.call("meet", json.dumps({"number": n}), 10).value))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [0, 1, 2, 3]


@dataclasses.dataclass
class Place:
    name: str
    size: float


class Odd:
    def __str__(self) -> str:
        return "odd thing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        ([1, "é"], '[1, "é"]'),
        ({"a": [None]}, '{"a": [null]}'),
        (Place("Oslo", 1.5), '{"name": "Oslo", "size": 1.5}'),
        ((1, 2), "[1, 2]"),
        (float("nan"), "nan"),
        (Odd(), "odd thing"),
    ],
)
def test_results_of_any_type_become_text(value: Any, text: str) -> None:
    def tool() -> Any:
        return value

    result = ToolBox([tool]).call("tool", "{}")
    assert result.content == text == text_of(value)
    assert result.value is value


def test_a_pydantic_model_as_argument_and_result() -> None:
    from pydantic import BaseModel, Field

    class Order(BaseModel):
        item: str
        count: int = Field(ge=1)

    def order(what: Order) -> Order:
        return what

    order.__annotations__ = {"what": Order, "return": Order}
    box = ToolBox([order])
    result = box.call("order", '{"what": {"item": "tea", "count": 2}}')
    assert result.value == Order(item="tea", count=2) and json.loads(result.content) == {"item": "tea", "count": 2}
    assert isinstance(box.call("order", '{"what": {"item": "tea", "count": 0}}').error, ToolCallError)
