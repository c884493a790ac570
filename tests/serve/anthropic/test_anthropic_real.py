"""Anthropic's own package and the default model."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.serve.anthropic.asking import HELLO, WEATHER, client
from tests.serve.serving import Serving

pytestmark = [pytest.mark.loopback, pytest.mark.real]


def test_stop_sequences(server: Serving) -> None:
    ours = client(server)
    said: list[Any] = [{"role": "user", "content": "Count from one to nine in digits, with commas."}]
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 40, "messages": said}
    begun: list[Any] = [*said, {"role": "assistant", "content": "1, 2, 3,"}]
    asked |= {"messages": begun, "extra_body": {"temperature": 0}}
    whole = ours.messages.create(**asked)
    text = whole.content[0].text  # type: ignore[union-attr]
    assert whole.stop_reason in ("end_turn", "max_tokens") and "5, 6" in text
    for stops, stopped in ((["zebra", "5, 6"], "5, 6"), (["6", "5"], "5"), (["zebra"], None)):
        message = ours.messages.create(**asked, stop_sequences=stops)
        with ours.messages.stream(**asked, stop_sequences=stops) as stream:
            again = stream.get_final_message()
        for found in (message, again):
            reason = "stop_sequence" if stopped else whole.stop_reason
            assert (found.stop_sequence, found.stop_reason) == (stopped, reason)
            said_now = found.content[0].text  # type: ignore[union-attr]
            assert said_now == (text.partition(stopped)[0] if stopped else text)


def test_usage_and_the_cache(server: Serving) -> None:
    ours = client(server)
    story = "Once there was a river that ran past nine old towns. " * 8
    said: list[Any] = [{"role": "user", "content": f"{story} How many towns?"}]
    asked: dict[str, Any] = {"model": "smollm2", "messages": said}
    counted = ours.messages.count_tokens(**asked).input_tokens
    used = [ours.messages.create(**asked, max_tokens=4).usage for _ in range(2)]
    for usage in used:
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        assert 1 <= usage.output_tokens <= 4
    assert (used[1].cache_read_input_tokens or 0) > counted // 2


def test_a_call_of_the_default_model(server: Serving) -> None:
    ours = client(server)
    said: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 60, "messages": said, "tools": [WEATHER]}
    message = ours.messages.create(**asked, tool_choice={"type": "any"}, extra_body={"temperature": 0})
    call = message.content[-1]
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "weather"
    assert list(call.input) == ["city"]


def test_the_same_answer_alone_and_in_a_crowd(server: Serving) -> None:
    ours = client(server)
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "messages": HELLO, "extra_body": {"temperature": 0}}
    alone = ours.messages.create(**asked).content[0].text  # type: ignore[union-attr]
    found: list[str] = []

    def ask() -> None:
        with ours.messages.stream(**asked) as stream:
            found.append(stream.get_final_text())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4
