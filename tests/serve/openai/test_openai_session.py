"""Our own sessions against our own server: what `EndpointExecutor` sends is what the server understands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from orchard.core.errors import OrchardError
from orchard.serve.settings import Limits
from orchard.session import errors
from orchard.session.executors.endpoint import EndpointExecutor
from orchard.session.session import Session
from orchard.session.turn import Call, Constraint, Done, Message, Reasoning, Sampling, Text, ToolSpec, Turn
from orchard.testing import Answer, ScriptedModel, ToolCall
from tests.serve.serving import Serving

pytestmark = pytest.mark.loopback
ASKED = (Message("user", "Say hello to Ada."),)


@dataclass
class Cat:
    name: str
    age: int


@pytest.mark.real
def test_a_session_speaks_to_the_default_model_through_a_server(server: Serving) -> None:
    there = EndpointExecutor(server.base_url, "smollm2")
    held = server.service.hub.take("smollm2")
    turn = Turn(ASKED, max_tokens=10, seed=1)
    never = threading.Event()
    by_wire = [event for event in there.run(turn, never) if isinstance(event, Text)]
    here = [event for event in held.speaker().run(turn, never) if isinstance(event, Text)]
    server.service.hub.give(held)
    assert "".join(event.delta for event in by_wire) == "".join(event.delta for event in here) != ""


@pytest.mark.real
def test_a_guided_answer(server: Serving) -> None:
    session = Session(model=EndpointExecutor(server.base_url, "smollm2"))
    cat = session.respond("Describe a cat called Tom who is 3.", generating=Cat).content
    assert isinstance(cat, Cat) and isinstance(cat.age, int)


def test_every_setting_arrives_as_it_was_sent(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([Answer("{}", reasoning="well")])
    there = EndpointExecutor(scripted_server(model).base_url, "scripted")
    sampling = Sampling(0.7, 40, 0.9, 0.1, 1.2, 0.5, -0.5)
    tool = ToolSpec("look", "Look it up", {"type": "object", "properties": {"a": {"type": "string"}}})
    turn = Turn(
        (Message("system", "Be brief."), *ASKED),
        tools=(tool,),
        parallel_calls=False,
        constraint=Constraint.json_schema({"type": "object"}),
        sampling=sampling,
        max_tokens=20,
        seed=3,
        stop=("END",),
        logprobs=2,
        reasoning="deep",
        bias={7: -1.5},
        priority=-3,
    )
    events = list(there.run(turn, threading.Event()))
    assert model.turns == [turn]
    assert events[0] == Reasoning("well") and isinstance(events[-1], Done) and events[-1].usage.input > 0


def test_calls_and_results_go_there_and_back(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([[ToolCall("look", {"a": "é"}), ToolCall("look", {"a": "b"})], "Done."])
    session = Session(model=EndpointExecutor(scripted_server(model).base_url, "scripted"), tools=[look])
    assert session.respond("Look.").content == "Done."
    told = model.turns[1].messages
    assert [message.content for message in told if message.role == "tool"] == ["saw é", "saw b"]
    assert all(message.name == "look" for message in told if message.role == "tool")


def look(a: str) -> str:
    """Look it up.

    Args:
        a: what
    """
    return f"saw {a}"


def test_a_required_tool(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([ToolCall("look", {"a": "b"})])
    there = EndpointExecutor(scripted_server(model).base_url, "scripted")
    tools = tuple(ToolSpec(name, "", {"type": "object", "properties": {}}) for name in ("look", "leap"))
    events = list(there.run(Turn(ASKED, tools, "look"), threading.Event()))
    assert isinstance(events[0], Call) and events[0].name == "look"
    assert model.turns[0].tool_mode == "required" and [tool.name for tool in model.turns[0].tools] == ["look"]


@pytest.mark.parametrize(
    ("answer", "limits", "kind"),
    [
        ("x", Limits(queue=0, running=1, per_client=0), errors.RateLimitedError),
        (OrchardError("broken"), Limits(), errors.FoundationModelsError),
    ],
)
def test_errors_are_understood(
    scripted_server: Callable[..., Serving], answer: object, limits: Limits, kind: type[Exception]
) -> None:
    there = EndpointExecutor(scripted_server([answer], limits=limits).base_url, "scripted")
    with pytest.raises(kind):
        list(there.run(Turn(ASKED), threading.Event()))


def test_too_long_is_understood(scripted_server: Callable[..., Serving]) -> None:
    there = EndpointExecutor(scripted_server(ScriptedModel(["x"], context_size=50)).base_url, "scripted")
    with pytest.raises(errors.ExceededContextWindowSizeError):
        list(there.run(Turn((Message("user", "word " * 100),)), threading.Event()))
