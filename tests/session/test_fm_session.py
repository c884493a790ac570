"""`LanguageModelSession`: the SDK's behaviour, on an event loop that never stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import orchard.fm as fm
from orchard.session.streams import Response, Snapshot
from orchard.session.transcript import PromptEntry
from orchard.testing import Answer
from tests.session.fm_talking import Dog, ready

# Responding


def test_a_text() -> None:
    session, model = ready("Hello.", instructions="Be kind.")
    assert asyncio.run(session.respond("Hi")) == "Hello."
    assert [message.content for message in model.turns[0].messages] == ["Be kind.", "Hi"]


def test_the_instructions_come_first_and_may_be_empty() -> None:
    session, _ = ready(instructions="")
    assert len(session.transcript) == 0


def test_a_generable_a_schema_and_a_json_schema() -> None:
    session, _ = ready(*[{"name": "Rex", "years": 4}] * 3)

    async def main() -> None:
        dog = await session.respond("A dog", Dog)
        assert isinstance(dog, Dog) and dog.name == "Rex"
        content = await session.respond("A dog", schema=Dog.generation_schema())
        assert isinstance(content, fm.GeneratedContent) and content.value(int, for_property="years") == 4
        content = await session.respond("A dog", json_schema=Dog.generation_schema().to_dict())
        assert isinstance(content, fm.GeneratedContent) and content.value(str, for_property="name") == "Rex"

    asyncio.run(main())


def test_a_type_and_a_schema_together_are_a_value_error() -> None:
    session, _ = ready("x")
    with pytest.raises(ValueError):
        asyncio.run(session.respond("go", Dog, schema=Dog.generation_schema()))


def test_the_first_of_type_schema_and_json_schema_counts() -> None:
    session, _ = ready({"name": "Rex", "years": 4})
    assert isinstance(asyncio.run(session.respond("A dog", Dog, json_schema={"type": "object"})), Dog)


@pytest.mark.parametrize("kind", [type("Empty", (), {}), lambda: 1, 7])
def test_a_type_that_no_answer_can_be_made_from_is_a_value_error(kind: Any) -> None:
    session, model = ready("x")
    with pytest.raises(ValueError):
        asyncio.run(session.respond("go", generating=kind))
    assert not model.turns


@pytest.mark.parametrize("prompt", ["", "  ", 7, []])
def test_a_prompt_that_is_none_is_also_a_generation_error(prompt: Any) -> None:
    session, _ = ready("fine")
    for kind in (fm.GenerationError, fm.PromptError):
        with pytest.raises(kind):
            asyncio.run(session.respond(prompt))
    assert asyncio.run(session.respond("go")) == "fine"


@pytest.mark.parametrize("schema", [{"x": object()}, '{"type": "object"}', "not json", 7])
def test_a_json_schema_that_is_none_is_what_the_sdk_raises(schema: Any) -> None:
    session, model = ready("x")
    for kind in (TypeError, fm.GenerationError, fm.InvalidGenerationSchemaError):
        with pytest.raises(kind):
            asyncio.run(session.respond("go", json_schema=schema))
    assert not model.turns


def test_options_count_for_guided_calls_apple_fails() -> None:
    session, model = ready({"name": "Rex", "years": 4})
    options = fm.GenerationOptions(fm.SamplingMode.random(top=9, seed=3), temperature=0.4)
    asyncio.run(session.respond("A dog", Dog, options=options))
    turn = model.turns[0]
    assert (turn.sampling.top_k, turn.sampling.temperature, turn.seed) == (9, 0.4, 3)


def test_the_whole_response_with_usage_apple_fails() -> None:
    session, _ = ready("one two three")
    response = asyncio.run(session.response("go", options=fm.GenerationOptions(logprobs=1)))
    assert isinstance(response, Response) and response.usage.output == 3 and len(response.logprobs or ()) == 3
    assert session.usage == response.usage


def test_errors_say_what_happened_apple_fails() -> None:
    session, _ = ready(fm.RefusalError("I give no medical advice"), fm.RateLimitedError("try in a minute"), "fine")

    async def main() -> None:
        with pytest.raises(fm.RefusalError) as caught:
            await session.respond("go")
        assert caught.value.explanation_entries and "medical" in caught.value.explanation
        with pytest.raises(fm.GenerationError, match="try in a minute"):
            await session.respond("go")
        assert len(session.transcript) == 0 and not session.is_responding
        assert await session.respond("go") == "fine"

    asyncio.run(main())


def test_calls_on_one_session_wait_in_line() -> None:
    session, model = ready(*["x y z"] * 5, script={"delay": 0.002})

    async def main() -> None:
        await asyncio.gather(*(session.respond(f"p{number}") for number in range(5)))

    asyncio.run(main())
    assert model.prompts == [f"p{number}" for number in range(5)] and len(session.transcript) == 10


def test_sessions_run_beside_each_other() -> None:
    together = threading.Barrier(2, timeout=5)

    def wait(turn: Any) -> str:
        together.wait()
        return "met"

    first, second = ready(wait)[0], ready(wait)[0]

    async def main() -> list[str]:
        return await asyncio.gather(first.respond("a"), second.respond("b"))

    assert asyncio.run(main()) == ["met", "met"]


def test_is_responding() -> None:
    session, _ = ready("a b c d", script={"delay": 0.02})

    async def main() -> None:
        assert session.is_responding is False
        task = asyncio.create_task(session.respond("go"))
        await asyncio.sleep(0.02)
        assert session.is_responding is True
        await task
        assert session.is_responding is False

    asyncio.run(main())


# Streaming


def test_a_stream_gives_the_text_so_far() -> None:
    session, _ = ready("one two three")

    async def main() -> list[str]:
        return [text async for text in session.stream_response("go")]

    assert asyncio.run(main()) == ["one ", "one two ", "one two three"]
    assert len(session.transcript) == 2


def test_a_stream_takes_options_by_position() -> None:
    session, model = ready("one two three")

    async def main() -> list[str]:
        return [text async for text in session.stream_response("go", fm.GenerationOptions(maximum_response_tokens=1))]

    assert asyncio.run(main()) == ["one "] and model.turns[0].max_tokens == 1


def test_guided_answers_stream_as_partial_objects_apple_fails() -> None:
    text = '{"name":"Rex","years":4}'
    session, _ = ready(Answer(text, pieces=tuple(text)))

    async def main() -> list[Any]:
        return [partial async for partial in session.stream_response("go", generating=Dog)]

    partials = asyncio.run(main())
    names = [partial.name for partial in partials if partial.name]
    assert names[0] == "R" and names[-1] == "Rex" and partials[-1].years == 4
    assert any(partial.years is None for partial in partials)


def test_snapshots_have_deltas_and_usage() -> None:
    session, _ = ready("one two")

    async def main() -> list[Snapshot]:
        return [snapshot async for snapshot in session.stream_snapshots("go")]

    seen = asyncio.run(main())
    assert "".join(snapshot.delta for snapshot in seen) == "one two" and seen[-1].usage is not None


def test_the_loop_keeps_ticking_during_a_stream_apple_fails() -> None:
    session, _ = ready("word " * 40, script={"delay": 0.01})

    async def main() -> tuple[int, float]:
        ticks, over = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not over:
                await asyncio.sleep(0.002)
                ticks += 1

        ticker = asyncio.create_task(tick())
        began = time.monotonic()
        async for _ in session.stream_response("go"):
            pass
        took = time.monotonic() - began
        over = True
        await ticker
        return ticks, took

    ticks, took = asyncio.run(main())
    assert took > 0.3 and ticks / took >= 50


def test_leaving_a_stream_early_stops_the_model_and_the_session_is_usable() -> None:
    session, _ = ready("word " * 500, "fine", script={"delay": 0.005})

    async def main() -> None:
        async for _ in session.stream_response("go"):
            break
        began = time.monotonic()
        assert await session.respond("again") == "fine"
        assert time.monotonic() - began < 3

    asyncio.run(main())
    assert [entry.text for entry in session.transcript if isinstance(entry, PromptEntry)] == ["again"]


def test_asking_inside_the_loop_over_a_stream_is_no_deadlock() -> None:
    session, _ = ready("one two three", *["aside"] * 3)

    async def main() -> list[str]:
        return [await session.respond(text) async for text in session.stream_response("go")]

    assert asyncio.run(asyncio.wait_for(main(), 10)) == ["aside"] * 3


def test_an_error_in_a_stream() -> None:
    session, _ = ready(Answer("one two", error=fm.RateLimitedError("busy")))

    async def main() -> list[str]:
        seen = []
        with pytest.raises(fm.RateLimitedError, match="busy"):
            async for text in session.stream_response("go"):
                seen.append(text)
        return seen

    assert asyncio.run(main())[-1] == "one two" and len(session.transcript) == 0
