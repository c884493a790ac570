"""Some seconds of the soak run against the real server, and that its checks notice what they are for."""

from __future__ import annotations

import json
import random

import pytest

from orchard.bench.load.client import Reply
from tests.soak import catalog, hostile
from tests.soak.hostile import Shot
from tests.soak.soak import memory_values, soak, wrong_refusal

ERROR = {"error": {"message": "max_tokens: use a number above 0", "code": "invalid_request"}}


def reply(status: int, body: object) -> Reply:
    return Reply(status=status, headers={"content-type": "application/json"}, pieces=[(0.0, json.dumps(body).encode())])


def stream(*events: object) -> Reply:
    pieces = [(0.0, f"data: {json.dumps(event)}\n\n".encode()) for event in events]
    return Reply(status=200, headers={"content-type": "text/event-stream"}, pieces=pieces)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.loopback
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [8.0, 30.0])
def test_some_seconds_of_everything(seconds: float, smollm2: object) -> None:
    report = soak(seconds=seconds, seed=1, clients=4)
    # Some seconds are no time to judge memory by: a server is still warming up.
    failed = [f"{claim.id}: {claim.value}" for claim in report.claims if not claim.passed and claim.id != "memory"]
    assert not failed, "\n".join([*failed, *report.notes])
    # How many fit into the seconds is the machine's: some of each kind went, on the slowest too.
    assert int(report["sent good"] or 0) >= 4 and int(report["sent malformed"] or 0) >= 1  # type: ignore[call-overload]


def test_what_is_sent_depends_on_the_seed_alone() -> None:
    for make in (hostile.malformed, hostile.over_long, hostile.hostile_schema):
        first = [make(random.Random(f"{number}")) for number in range(40)]
        assert first == [make(random.Random(f"{number}")) for number in range(40)]
        assert len({shot.body for shot in first}) > 8


def test_refusals_are_checked() -> None:
    shot = Shot("x", "/v1/chat/completions", b"{}")
    assert wrong_refusal(shot, reply(400, ERROR)) == ""
    assert "status 200" in wrong_refusal(shot, reply(200, {}))
    assert "status 500" in wrong_refusal(shot, reply(500, ERROR))
    assert "without a code" in wrong_refusal(shot, reply(422, {"detail": "no"}))
    assert "without a code" in wrong_refusal(shot, reply(400, {"error": {"message": "no", "code": ""}}))
    known = Shot("x", "/", b"", statuses=(404,), codes=("model_not_found",))
    assert "'invalid_request'" in wrong_refusal(known, reply(404, ERROR)) and wrong_refusal(known, reply(400, ERROR))
    assert wrong_refusal(Shot("x", "/", b"", statuses=(200, 4)), reply(200, {})) == ""


def test_growing_memory_is_seen() -> None:
    level = memory_values([(float(number), 1000) for number in range(100)])
    grown = memory_values([(float(number), 1000 + 3 * number) for number in range(100)])
    assert level["memory, end over warm-up"].value == 1.0
    assert float(grown["memory, end over warm-up"].value or 0) > 1.05


def test_a_stream_and_a_whole_answer_read_the_same() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome","days":2}'}}
    whole = reply(
        200,
        {"choices": [{"index": 0, "message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]},
    )

    def delta(**parts: object) -> dict[str, object]:
        return {"choices": [{"index": 0, "delta": parts, "finish_reason": None}]}

    pieces = [
        delta(role="assistant"),
        delta(tool_calls=[{"index": 0, "id": "2", "function": {"name": "weather", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city":"Rome"'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ',"days":2}'}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    assert catalog.read_chat(whole) == catalog.read_chat(stream(*pieces))
    [item] = [item for item in catalog.items() if item.name == "tool"]
    item.check(catalog.read_chat(whole))
    with pytest.raises(catalog.Wrong):
        item.check(catalog.read_chat(stream(*pieces[:2], pieces[-1])).replace('""', '"{}"'))


def test_wrong_answers_are_seen() -> None:
    items = {item.name: item for item in catalog.items()}
    with pytest.raises(catalog.Wrong, match="schema"):
        items["shaped city"].check(json.dumps([['{"name": "Rome"}', [], "stop"]]))
    with pytest.raises(catalog.Wrong, match="differ"):
        items["chat twice"].check(json.dumps([["a", [], "stop"], ["b", [], "stop"]]))
    with pytest.raises(catalog.Wrong, match="error"):
        items["chat bread"].read(stream(ERROR))
