"""OpenAI's own package against a server with the default model: `/v1/completions`, as evaluation programs use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from orchard.session.completion import Completion
from orchard.session.turn import Text
from orchard.testing import ScriptedModel
from tests.serve.serving import Serving

pytestmark = [pytest.mark.loopback, pytest.mark.real]
MODEL = "smollm2"
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.openai()


@pytest.fixture(scope="module")
def executor(server: Serving) -> Any:
    return server.service.hub.take(MODEL).speaker()


def asked(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": FRANCE, "temperature": 0, "max_tokens": 4} | more)


def test_a_text_is_gone_on_with(client: openai.OpenAI) -> None:
    answer = asked(client)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    assert answer.choices[0].text.startswith(" Paris") and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="One two three", temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_token_ids_are_the_text_that_they_spell(client: openai.OpenAI, executor: Any) -> None:
    assert asked(client, prompt=executor.encode(FRANCE)).choices == asked(client).choices


def test_several_prompts_and_answers_are_in_order(client: openai.OpenAI, executor: Any) -> None:
    prompts = [FRANCE, "The capital of Italy is"]
    answer = asked(client, prompt=prompts, n=2, seed=5, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [asked(client, prompt=prompts[1], seed=seed, temperature=1).choices[0].text for seed in (5, 6)]
    assert [choice.text for choice in answer.choices[2:]] == alone
    assert answer.usage.prompt_tokens == 10
    by_ids = asked(client, prompt=[executor.encode(prompt) for prompt in prompts], n=2, seed=5, temperature=1)
    assert by_ids.choices == answer.choices


def test_more_prompts_than_run_at_once_are_all_answered(client: openai.OpenAI) -> None:
    answer = asked(client, prompt=[f"{number}," for number in range(40)], max_tokens=1)
    assert [choice.index for choice in answer.choices] == list(range(40)) and answer.usage.completion_tokens == 40
    texts: dict[int, str] = {}
    for chunk in asked(client, prompt=[f"{number}," for number in range(40)], max_tokens=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[place] for place in range(40)] == [choice.text for choice in answer.choices]


def test_the_prompt_is_scored_as_evaluations_want_it(client: openai.OpenAI, executor: Any) -> None:
    """What `lm_eval --model local-completions` sends and reads: `token_logprobs[length of the context:-1]`."""
    ids = executor.encode(FRANCE + " Paris")
    marks = asked(client, prompt=[ids], echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert len(marks.tokens) == len(marks.token_logprobs) == len(marks.top_logprobs) == len(ids) + 1
    assert marks.token_logprobs[0] is None and marks.top_logprobs[0] is None
    assert marks.tokens[:-1] == [text.decode() for text in executor.spelled(ids)]
    never = threading.Event()
    first = next(iter(executor.complete(Completion(tuple(ids), 0, echo=True, logprobs=1), never)))
    assert isinstance(first, Text)
    assert marks.token_logprobs[1:-1] == [entry.logprob for entry in first.logprobs]
    assert marks.token_logprobs[5] == max(marks.top_logprobs[5].values())  # " Paris" is what it would have said


def test_an_end_at_once_still_counts_as_one_token(client: openai.OpenAI, executor: Any) -> None:
    """A model that has nothing to add writes its end token: evaluations leave out the last entry, whatever it is."""
    end = min(executor.model.tokenizer.eos_ids)
    answer = asked(client, prompt="Hello", echo=True, logprobs=1, max_tokens=1, logit_bias={str(end): 100})
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.token_logprobs) == len(executor.encode("Hello")) + 1


def test_only_the_prompt_can_be_asked_for(client: openai.OpenAI) -> None:
    answer = asked(client, echo=True, max_tokens=0, logprobs=0)
    assert answer.choices[0].text == FRANCE and answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == 5
    assert asked(client, echo=True, max_tokens=0).choices[0].text == FRANCE


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text(client: openai.OpenAI, echo: bool) -> None:
    choice = asked(client, prompt="Où 🎉 est", echo=echo, logprobs=2, max_tokens=3).choices[0]
    marks = choice.logprobs
    assert marks.text_offset[0] == 0 and marks.text_offset == sorted(marks.text_offset)
    for token, place in zip(marks.tokens, marks.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[place : place + len(token)] == token


def test_a_prompt_of_one_token_is_echoed(client: openai.OpenAI, executor: Any) -> None:
    (token,) = executor.encode("The")
    choice = asked(client, prompt=[token], echo=True, logprobs=1, max_tokens=1).choices[0]
    assert choice.text.startswith("The") and choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == 2


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2}, {"n": 2, "seed": 1}]
)
def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI, more: dict[str, Any]) -> None:
    whole = asked(client, **more).choices
    texts, tokens = [""] * len(whole), [[] for _ in whole]  # type: ignore[var-annotated]
    ends: list[str | None] = [None] * len(whole)
    for chunk in asked(client, stream=True, **more):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole] and ends == [choice.finish_reason for choice in whole]
    assert tokens == [choice.logprobs.tokens if choice.logprobs else [] for choice in whole]


def test_usage_in_a_stream(client: openai.OpenAI) -> None:
    last = list(asked(client, stream=True, prompt=[FRANCE, FRANCE], stream_options={"include_usage": True}))[-1]
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (10, 8)


def test_stops_biases_penalties_and_forms(client: openai.OpenAI) -> None:
    assert asked(client, stop=".", max_tokens=8).choices[0].text == " Paris"
    assert asked(client, extra_body={"guided_choice": [" Rome", " Oslo"]}, max_tokens=8).choices[0].text in (
        " Rome",
        " Oslo",
    )
    assert asked(client, extra_body={"guided_regex": " [A-Z]{3}"}, max_tokens=8).choices[0].text[1:].isupper()
    plain = asked(client, max_tokens=24).choices[0].text
    assert asked(client, max_tokens=24, frequency_penalty=2, presence_penalty=2).choices[0].text != plain
    assert asked(client, max_tokens=24, best_of=1, suffix="", user="me").choices[0].text == plain


@pytest.mark.parametrize(
    ("settings", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_request"),
        ({"prompt": []}, "prompt", "invalid_request"),
        ({"prompt": ["a", ""]}, "prompt.1", "invalid_request"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_request"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_request"),
        ({"prompt": [-1]}, "prompt", "invalid_request"),
        ({"prompt": 5}, "prompt", "invalid_request"),
        ({"prompt": ["a"] * 65}, "prompt", "invalid_request"),
        ({"prompt": ["a"] * 16, "n": 5}, "n", "invalid_request"),
        ({"prompt": [999_999]}, None, "invalid_request"),
        ({"logprobs": 6}, "logprobs", "invalid_request"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"suffix": "."}, "suffix", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"extra_body": {"grammar": "root ::= x"}}, "grammar", "unsupported_parameter"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice", "invalid_request"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, settings: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, **settings)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_both_counts(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"9,000 tokens.*8,192") as caught:
        asked(client, prompt=[504] * 9000, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_that_only_speaks_cannot_go_on_with_texts(scripted_server: Callable[..., Serving]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(scripted_server(ScriptedModel(["x"])).openai(), model="scripted")
    assert caught.value.code == "wrong_kind_of_model"


def test_the_asynchronous_client(server: Serving, client: openai.OpenAI) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as many:
            settings: Any = {"model": MODEL, "prompt": FRANCE, "temperature": 0, "max_tokens": 4}
            return "".join(
                [chunk.choices[0].text async for chunk in await many.completions.create(**settings, stream=True)]
            )

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(main())))
    thread.start()
    thread.join(60)
    assert found == [asked(client).choices[0].text]
