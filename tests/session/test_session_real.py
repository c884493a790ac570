"""The same session over the default model: few tokens, real grammar, real guardrails, real resume."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import orchard.fm as fm
from orchard.session.options import GenerationOptions, SamplingMode
from orchard.session.session import Session

pytestmark = pytest.mark.real


# Longer than the 64 tokens by which the engine keeps what it has read.
HELPFUL = "You are a helpful assistant that answers questions in one short sentence. " * 6


@fm.generable("A cat")
class Cat:
    name: str = fm.guide("its name", regex="[A-Z][a-z]{2,8}")
    age: int = fm.guide("years", range=(1, 15))


@pytest.fixture(autouse=True, scope="module")
def packing_home(own_home: Path) -> None:
    """The default model is packed once for all tests, and not once more for these."""


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    from orchard.session.model import load

    return load("smollm2")


def few(count: int = 12, **more: Any) -> GenerationOptions:
    return GenerationOptions(maximum_response_tokens=count, **more)


def test_text_stream_and_usage(model: Any) -> None:
    with Session(HELPFUL, model=model, options=few()) as session:
        first = session.respond("What is the capital of France?")
        assert "Paris" in first.text and first.usage.output > 0 and first.usage.calls > 0
        stream = session.stream("And of Italy?")
        text = "".join(stream.deltas())
        assert text == stream.response.text and stream.response.usage.cached > 0
        assert session.usage == first.usage + stream.response.usage


def test_a_typed_answer_and_its_partials(model: Any) -> None:
    with Session(model=model, options=few(60, sampling=SamplingMode.random(seed=3))) as session:
        stream = session.stream("Make up a cat.", Cat)
        seen = [snapshot.content for snapshot in stream]
        cat = stream.response.content
        assert isinstance(cat, Cat) and 1 <= cat.age <= 15 and cat.name[0].isupper()
        assert seen[-1].name == cat.name and stream.response.usage.calls < stream.response.usage.output


def test_choices_and_regex(model: Any) -> None:
    with Session(model=model) as session:
        assert session.respond("Is the sky blue?", choices=["yes", "no"]).content in ("yes", "no")
        assert len(session.respond("A number of four digits.", regex=r"\d{4}").content) == 4


def test_the_same_seed_gives_the_same_answer(model: Any) -> None:
    options = few(16, sampling=SamplingMode.random(seed=7))
    answers = {Session(model=model).respond("Tell me a story.", options=options).text for _ in range(2)}
    assert len(answers) == 1
    other = few(16, sampling=SamplingMode.random(seed=8))
    assert Session(model=model).respond("Tell me a story.", options=other).text not in answers


def test_a_resumed_session_goes_on_as_if_it_had_never_stopped(model: Any, tmp_path: Path) -> None:
    options = few(16, sampling=SamplingMode.random(seed=11))
    session = Session(HELPFUL, model=model, options=options)
    session.respond("Hello, who are you?")
    session.save(tmp_path / "talk.json")
    there = session.respond("Where do you sail?")
    program = (
        "import json, sys; from orchard.session.session import Session\n"
        "answer = Session.resume(sys.argv[1]).respond('Where do you sail?')\n"
        "print(json.dumps([answer.text, answer.usage.cached, 'torch' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "talk.json")], capture_output=True, text=True, check=True
    )
    text, cached, torch = json.loads(done.stdout)
    assert text == there.text and cached >= 64 and not torch
    assert (tmp_path / "talk.json.prefix").is_file()


def test_a_tool_is_called_with_arguments_of_its_schema(model: Any) -> None:
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return f"It is sunny in {city}."

    with Session(model=model, tools=[weather], options=few(32)) as session:
        options = GenerationOptions(tool_calling_mode="required", maximum_response_tokens=32)
        response = session.respond("What is the weather in Paris?", options=options)
    assert len(called) == 1 and response.text


def test_the_sdk_session_and_cancelling(model: Any) -> None:
    async def main() -> None:
        session = fm.LanguageModelSession("You are brief.", model=model)
        texts = [text async for text in session.stream_response("Count to three.", few(8))]
        assert texts and all(later.startswith(earlier) for earlier, later in pairwise(texts))
        task = asyncio.create_task(session.respond("Write a very long story."))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 2 and len(session.transcript) == 3
        assert isinstance(await session.respond("Hello", options=few(4)), str)

    asyncio.run(main())


def test_token_counts_and_context(smollm2: Path) -> None:
    async def main() -> None:
        model = fm.SystemLanguageModel()
        assert model.is_available() == (True, None) and model.context_size > 1000
        assert 0 < await model.token_count("one") < await model.token_count("one two three four")

    asyncio.run(main())


def test_content_tagging(model: Any) -> None:
    session = Session(model=model, use_case="content_tagging", options=few(160))
    tags = session.respond("The sea was calm and the boat sailed to the Greek islands.").content.tags
    assert 1 <= len(tags) <= 8 and all(tag == tag.lower() and 2 <= len(tag) <= 24 for tag in tags)
