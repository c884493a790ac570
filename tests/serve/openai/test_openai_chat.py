"""OpenAI's own package, unmodified, against a server with the default model: `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.openai.asking_chat import ASKED, MODEL, asked, said, streamed
from tests.serve.serving import Serving

pytestmark = [pytest.mark.loopback, pytest.mark.real]
NEVER_END = {"0": -100, "2": -100}
"""The default model's end tokens."""


# Answers ------------------------------------------------------------------------------------------------------------------


def test_an_answer_has_every_field_that_the_package_reads(client: openai.OpenAI) -> None:
    answer = asked(client)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert answer.created > 1_600_000_000 and answer.system_fingerprint.startswith("fp_")
    choice = answer.choices[0]
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None
    assert answer.usage.prompt_tokens > 10 and 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer._request_id.startswith("req_")


def test_a_prompt_that_was_read_before_is_counted_as_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Numbers: " + " ".join(str(n) for n in range(150))}]
    asked(client, messages=messages, max_tokens=1)
    again = asked(client, messages=messages, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 64


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI) -> None:
    assert streamed(client, max_tokens=24) == said(client, max_tokens=24)


def test_a_stream_begins_with_the_role_and_ends_with_a_reason_and_the_usage(client: openai.OpenAI) -> None:
    chunks = list(asked(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12 and chunks[-1].usage.prompt_tokens > 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_without_being_asked_a_stream_has_no_usage(client: openai.OpenAI) -> None:
    chunks = list(asked(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_packages_own_stream_helper(client: openai.OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": ASKED, "extra_body": {"guided_choice": ["Hello, dear Ada!"]}}
    with client.chat.completions.stream(**settings) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds >= {"content.delta", "content.done"}
    assert final.choices[0].message.content == "Hello, dear Ada!" and final.choices[0].finish_reason == "stop"


def test_several_turns_are_all_read(client: openai.OpenAI) -> None:
    first = asked(client)
    longer = [*ASKED, first.choices[0].message, {"role": "user", "content": "And to Bob."}]
    second = asked(client, messages=longer)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 10


def test_what_the_package_dumps_can_be_sent_back(client: openai.OpenAI) -> None:
    message = asked(client).choices[0].message.model_dump()
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[*ASKED, message, ASKED[0]], max_tokens=2, temperature=0
    )
    assert "x-orchard-ignored" not in answer.headers and answer.parse().choices


def test_parts_of_text_are_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say hello "}, {"type": "text", "text": "to Ada."}]
    assert said(client, messages=[{"role": "user", "content": parts}]) == said(client)


def test_developer_means_system(client: openai.OpenAI) -> None:
    told = {"content": "You are a pirate. Answer as one."}
    by_role = [said(client, messages=[{"role": role, **told}, *ASKED]) for role in ("system", "developer")]
    assert by_role[0] == by_role[1] != said(client)


def test_several_answers_have_their_places(client: openai.OpenAI) -> None:
    answer = asked(client, n=3, temperature=1, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    one = asked(client, temperature=1, seed=7)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens > one.usage.completion_tokens


def test_several_streamed_answers_say_the_same_as_whole_ones(client: openai.OpenAI) -> None:
    texts, ends = ["", "", ""], [""] * 3
    for chunk in asked(client, n=3, temperature=1, seed=7, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    whole = asked(client, n=3, temperature=1, seed=7).choices
    assert texts == [choice.message.content for choice in whole] and ends == [one.finish_reason for one in whole]


def test_a_seed_repeats_and_the_seeds_of_choices_are_neighbours(client: openai.OpenAI) -> None:
    pair = [choice.message.content for choice in asked(client, n=2, temperature=1, seed=40).choices]
    assert pair == [said(client, temperature=1, seed=40), said(client, temperature=1, seed=41)]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    assert len({said(client, temperature=1.5, max_tokens=16) for _ in range(4)}) > 1


def test_an_answer_ends_before_a_stop_text(client: openai.OpenAI) -> None:
    whole = said(client, max_tokens=24)
    word = whole.split()[3]
    cut = asked(client, max_tokens=24, stop=word)
    assert cut.choices[0].message.content == whole[: whole.index(word)] and cut.choices[0].finish_reason == "stop"
    assert streamed(client, max_tokens=24, stop=["never said", word]) == cut.choices[0].message.content


def test_both_words_for_the_most_tokens(client: openai.OpenAI) -> None:
    answer = asked(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


def test_a_bias_rules_tokens_in_and_out(client: openai.OpenAI, server: Serving) -> None:
    executor = server.service.hub.take(MODEL).speaker()
    first = asked(client, max_tokens=1).choices[0].message.content
    (token,) = executor.encode(first)
    assert said(client, max_tokens=1, logit_bias={str(token): -100}) != first
    (wanted,) = executor.encode(" cheese")
    assert said(client, max_tokens=2, logit_bias={str(wanted): 100}) == " cheese cheese"


def test_penalties_and_the_samplers_of_other_servers(client: openai.OpenAI) -> None:
    plain = said(client, max_tokens=32)
    assert said(client, max_tokens=32, frequency_penalty=2.0, presence_penalty=2.0) != plain
    more = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "priority": -1}
    assert said(client, max_tokens=32, temperature=1, extra_body=more) == plain
    assert said(client, max_tokens=32, temperature=1, top_p=0) == plain


def test_log_probabilities_of_the_tokens(client: openai.OpenAI) -> None:
    choice = asked(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)


def test_log_probabilities_in_a_stream_are_the_same(client: openai.OpenAI) -> None:
    found = []
    for chunk in asked(client, stream=True, logprobs=True):
        found += [entry for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    assert found == asked(client, logprobs=True).choices[0].logprobs.content and len(found) == 12


def test_tokens_of_a_stop_text_have_no_log_probabilities(client: openai.OpenAI) -> None:
    word = f" {said(client).split()[2]}"
    choice = asked(client, stop=word, logprobs=True).choices[0]
    tokens = "".join(entry.token for entry in choice.logprobs.content)
    assert word not in tokens and tokens == choice.message.content


# Company ----------------------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_the_same_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    questions = [f"Count from {number} to {number + 5}." for number in range(8)]

    def answered(question: str) -> str:
        return said(client, messages=[{"role": "user", "content": question}], max_tokens=16)

    alone = [answered(question) for question in questions]
    with ThreadPoolExecutor(8) as crowd:
        assert list(crowd.map(answered, questions)) == alone


def test_a_stream_that_is_left_frees_its_place(client: openai.OpenAI, server: Serving) -> None:
    server.settled()
    before = server.facts(MODEL)["tokens"]
    stream = asked(client, stream=True, max_tokens=4000, logit_bias=NEVER_END)
    for _, _ in zip(range(4), stream, strict=False):
        pass
    assert server.service.gate.running == 1
    stream.close()
    server.settled()
    facts = server.facts(MODEL)
    assert facts["running"] == facts["waiting"] == 0 and facts["tokens"] - before < 1000


def test_a_client_that_stops_waiting(client: openai.OpenAI, server: Serving) -> None:
    with pytest.raises((openai.APITimeoutError, openai.InternalServerError)):  # the server knows how long it waits
        asked(client.with_options(timeout=0.15), max_tokens=4000, logit_bias=NEVER_END)
    server.settled()


def test_a_deadline_of_the_client_is_obeyed(client: openai.OpenAI, server: Serving) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        asked(client, max_tokens=4000, logit_bias=NEVER_END, extra_headers={"x-request-timeout": "0.2"})
    assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
    server.settled()


def test_the_asynchronous_client(server: Serving, client: openai.OpenAI) -> None:
    async def main() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as many:
            settings: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 12}
            text = ""
            async for chunk in await many.chat.completions.create(**settings, stream=True):
                text += chunk.choices[0].delta.content or ""
            whole = await asyncio.gather(*(many.chat.completions.create(**settings) for _ in range(4)))
            return text, [str(answer.choices[0].message.content) for answer in whole]

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(main())))
    thread.start()
    thread.join(60)
    streamed_text, whole = found[0]
    assert {streamed_text, *whole} == {said(client)}
