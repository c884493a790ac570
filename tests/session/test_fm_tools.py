"""`orchard.fm`: cancelling, tools, transcripts, and that nothing lingers."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest

import orchard.fm as fm
from orchard.core.errors import UsageError
from orchard.session.transcript import ToolOutput
from orchard.testing import Answer, ScriptedModel, ToolCall, scripted
from tests.session.fm_talking import Double, ready

# Cancelling


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancelled_task_stops_the_model_within_a_token(streaming: bool) -> None:
    session, model = ready(Answer("word " * 1000, delay=0.02), "fine")

    async def work() -> None:
        if streaming:
            async for _ in session.stream_response("go"):
                pass
        else:
            await session.respond("go")

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0.1)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 3 and not session.is_responding
        assert len(session.transcript) == 0
        assert await session.respond("again") == "fine"

    asyncio.run(main())
    assert len(session.transcript) == 2 and len(model.turns) == 2


def test_one_that_waits_in_line_can_be_cancelled() -> None:
    session, model = ready(Answer("a b c d e", delay=0.02), "third")

    async def main() -> str:
        first = asyncio.create_task(session.respond("first"))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(session.respond("second"))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await first == "a b c d e"
        return str(await session.respond("third"))

    assert asyncio.run(main()) == "third" and model.prompts == ["first", "third"]


def test_a_timeout_around_a_call() -> None:
    session, _ = ready(Answer("word " * 1000, delay=0.01), "fine")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.respond("go"), 0.05)
        assert await session.respond("again") == "fine"

    asyncio.run(main())


def test_cancelling_while_a_tool_runs_cancels_the_tool() -> None:
    cancelled: list[bool] = []

    async def slow() -> str:
        """Takes long."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "late"

    session, _ = ready(ToolCall("slow"), "fine", tools=[slow])

    async def main() -> None:
        task = asyncio.create_task(session.respond("go"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        assert cancelled == [True] and await session.respond("again") == "fine"

    asyncio.run(asyncio.wait_for(main(), 10))


# Tools


def test_an_sdk_tool_runs_on_the_loop_of_the_caller_apple_fails() -> None:
    tool = Double()
    session, model = ready(ToolCall("double", {"number": 21}), "It is 42.", tools=[tool])
    assert asyncio.run(session.respond("go")) == "It is 42."
    assert tool.thread == threading.get_ident()
    assert model.turns[1].messages[-1].content == "42"
    assert [entry.text for entry in session.transcript if isinstance(entry, ToolOutput)] == ["42"]


def test_a_plain_function_runs_in_a_thread_and_blocks_nothing() -> None:
    def slow() -> str:
        """Takes a while."""
        time.sleep(0.1)
        return "done"

    session, _ = ready(ToolCall("slow"), "ok", tools=[slow])

    async def main() -> int:
        task = asyncio.create_task(session.respond("go"))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(main()) >= 10


def test_a_tool_that_asks_its_own_session_is_refused_and_not_a_deadlock() -> None:
    held: list[fm.LanguageModelSession] = []

    async def nested() -> str:
        """Asks the same session."""
        return str(await held[0].respond("inner"))

    session, _ = ready(ToolCall("nested"), "fine", tools=[nested])
    held.append(session)
    response = asyncio.run(asyncio.wait_for(session.response("go"), 10))
    assert response.text == "fine"
    assert isinstance(response.tool_errors[0].underlying_error, fm.ConcurrentRequestsError)


def test_a_failing_tool_is_visible_apple_fails() -> None:
    async def bad() -> str:
        """Fails."""
        raise OSError("no disk")

    session, _ = ready(ToolCall("bad"), "sorry", tools=[bad])
    response = asyncio.run(session.response("go"))
    assert isinstance(response.tool_errors[0], fm.ToolCallError) and "no disk" in str(response.tool_errors[0])


# Transcripts


def test_from_transcript_keeps_the_object_and_its_instructions() -> None:
    first, _ = ready("One.", instructions="Be kind.")
    asyncio.run(first.respond("a"))
    model = ScriptedModel(["Two."])
    second = fm.LanguageModelSession.from_transcript(first.transcript, model)
    assert second.transcript is first.transcript
    assert asyncio.run(second.respond("b")) == "Two."
    assert [message.content for message in model.turns[0].messages] == ["Be kind.", "a", "One.", "b"]


def test_a_transcript_goes_through_its_dict() -> None:
    session, _ = ready("One.", instructions="Be kind.")

    async def main() -> None:
        await session.respond("a")
        document = await session.transcript.to_dict()
        again = await fm.Transcript.from_dict(document)
        assert again == session.transcript and document["type"] == "FoundationModels.Transcript"

    asyncio.run(main())


def test_setting_the_transcript_while_responding_is_refused() -> None:
    session, _ = ready("a b c", script={"delay": 0.02})

    async def main() -> None:
        task = asyncio.create_task(session.respond("go"))
        await asyncio.sleep(0.03)
        with pytest.raises(fm.TranscriptError):
            session.transcript = fm.Transcript()
        await task
        session.transcript = fm.Transcript()

    asyncio.run(main())


# The rest


def test_an_async_context_manager_apple_fails() -> None:
    async def main() -> None:
        async with ready("x")[0] as session:
            assert await session.respond("go") == "x"
        with pytest.raises(UsageError, match="closed"):
            await session.respond("go")

    asyncio.run(main())


def test_prewarm_returns_at_once() -> None:
    session, model = ready("x", instructions="Be kind.")
    session.prewarm("Once")
    until = time.monotonic() + 5
    while not model.prewarmed and time.monotonic() < until:
        time.sleep(0.005)
    assert [message.content for message in model.prewarmed[0]] == ["Be kind.", "Once"]


def test_content_tagging_without_a_type_gives_a_text() -> None:
    with scripted([{"tags": ["sea", "wind"]}]):
        model = fm.SystemLanguageModel(use_case=fm.SystemLanguageModelUseCase.CONTENT_TAGGING)
        assert asyncio.run(fm.LanguageModelSession(model=model).respond("A windy day at sea.")) == "sea, wind"


def test_feedback_and_reprs() -> None:
    session, _ = ready("x")
    assert b'"negative"' in session.log_feedback_attachment("negative")
    assert repr(session).startswith("<LanguageModelSession") and "<div" in session._repr_html_()


def test_a_session_is_freed_at_once_apple_fails(no_collector: None) -> None:
    async def main() -> weakref.ref[Any]:
        session, _ = ready("one", fm.RateLimitedError("busy"), "two three", "word " * 50, script={"delay": 0.001})
        await session.respond("a")
        with suppress(fm.RateLimitedError):
            await session.respond("b")
        async for _ in session.stream_response("c"):
            pass
        task = asyncio.create_task(session.respond("d"))
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        del task
        found = weakref.ref(session.session)
        del session
        until = time.monotonic() + 2
        while found() is not None and time.monotonic() < until:  # a worker may still be ending
            await asyncio.sleep(0.01)
        return found

    assert asyncio.run(main())() is None
