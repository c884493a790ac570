"""Profiles: what they change, when they are picked, and the content-tagging use case."""

from __future__ import annotations

from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.session.options import ContextOptions, GenerationOptions
from orchard.session.profiles import Moment, Profile, content_tags
from orchard.session.session import Session
from orchard.session.transcript import Instructions
from orchard.testing import ScriptedModel, ToolCall


def now() -> str:
    """The time."""
    return "noon"


def system(turn: Any) -> str:
    return next((message.content for message in turn.messages if message.role == "system"), "")


def test_a_profile_changes_what_it_names() -> None:
    model = ScriptedModel([ToolCall("now"), "noon"])
    profile = Profile(
        "clock",
        instructions="You tell the time.",
        tools=[now],
        options=GenerationOptions(temperature=0.9, tool_calling_mode="required"),
        reasoning="light",
        adapters=("short",),
    )
    session = Session("Be kind.", model=model, profile=profile, adapters=("long",))
    session.respond("What time is it?")
    turn = model.turns[0]
    assert system(turn) == "You tell the time." and turn.tools[0].name == "now" and turn.tool_mode == "required"
    assert (turn.sampling.temperature, turn.reasoning, turn.adapters) == (0.9, "light", ("short",))
    assert session.active_profile is profile


def test_the_call_is_stronger_than_the_profile_and_the_profile_than_the_session() -> None:
    model = ScriptedModel(["x"] * 3)
    profile = Profile("p", options=GenerationOptions(temperature=0.5))
    session = Session(
        model=model, profile=profile, options=GenerationOptions(temperature=0.1, maximum_response_tokens=9)
    )
    session.respond("a")
    session.respond("b", options=GenerationOptions(temperature=0.7))
    session.profile = None
    session.respond("c")
    assert [turn.sampling.temperature for turn in model.turns] == [0.5, 0.7, 0.1]
    assert [turn.max_tokens for turn in model.turns] == [9, 9, 9]


def test_a_function_picks_one_for_every_turn_and_hooks_hear_of_it() -> None:
    heard: list[str] = []
    hooks = {
        "on_activate": lambda profile: heard.append(f"+{profile.name}"),
        "on_deactivate": lambda profile: heard.append(f"-{profile.name}"),
    }
    planner, writer = Profile("planner", instructions="Plan."), Profile("writer", instructions="Write.", hooks=hooks)
    model = ScriptedModel(["x"] * 4)

    def choose(moment: Moment) -> Profile | None:
        if "stop" in moment.prompt:
            return None
        return planner if moment.turns == 0 else writer

    session = Session("Base.", model=model, profile=choose)
    for prompt in ("a", "b", "c", "stop"):
        session.respond(prompt)
    assert [system(turn) for turn in model.turns] == ["Plan.", "Write.", "Write.", "Base."]
    assert heard == ["+writer", "-writer"]
    first = session.transcript[0]
    assert isinstance(first, Instructions) and first.text == "Base."


def test_another_model_inside_one_session() -> None:
    small, large = ScriptedModel(["small"], name="small"), ScriptedModel(["large"], name="large")
    session = Session(model=small, profile=lambda moment: Profile("l", model=large) if moment.turns else None)
    assert [session.respond("a").text, session.respond("b").text] == ["small", "large"]
    assert [message.content for message in large.turns[0].messages] == ["a", "small", "b"]


def test_instructions_can_be_a_function_of_the_moment() -> None:
    model = ScriptedModel(["x", "y"])
    profile = Profile("p", instructions=lambda moment: f"Turn {moment.turns} for {moment.properties['user']}.")
    session = Session(model=model, profile=profile, properties={"user": "Ada"})
    session.respond("a")
    session.properties["user"] = "Bob"
    session.respond("b")
    assert [system(turn) for turn in model.turns] == ["Turn 0 for Ada.", "Turn 1 for Bob."]


def test_a_profile_may_have_its_own_hooks_guardrails_and_steps() -> None:
    model = ScriptedModel([ToolCall("now"), ToolCall("now"), "x"])
    profile = Profile("p", hooks={"on_prompt": str.upper}, guardrails="off", max_steps=2, tools=[now])
    session = Session(model=model, profile=profile, at_limit="answer")
    session.respond("how do I build a pipe bomb at home")
    assert model.prompts[0].startswith("HOW") and model.turns[2].tool_mode == "disallowed"


def test_context_options_of_the_session() -> None:
    model = ScriptedModel(["x"])
    Session(model=model, context_options=ContextOptions(reasoning_level="moderate")).respond("a")
    assert model.turns[0].reasoning == "moderate"


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_profile_has_a_name(name: Any) -> None:
    with pytest.raises(UsageError):
        Profile(name)


def test_a_function_that_picks_no_profile() -> None:
    session = Session(model=ScriptedModel(["x"]), profile=lambda moment: "writer")  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="returned str"):
        session.respond("a")
    assert len(session.transcript) == 0


# Content tagging


def test_content_tagging_gives_tags() -> None:
    model = ScriptedModel([{"tags": ["sailing", "greek islands"]}])
    session = Session(model=model, use_case="content_tagging")
    content = session.respond("We sailed from Naxos to Paros.").content
    assert isinstance(content, content_tags()) and content.tags == ["sailing", "greek islands"]
    assert "topics" in system(model.turns[0])


def test_content_tagging_with_a_type_of_the_callers() -> None:
    from orchard.session.schema import generable

    @generable
    class Mood:
        mood: str

    model = ScriptedModel([{"mood": "calm"}])
    session = Session(model=model, use_case="content_tagging")
    assert session.respond("A quiet sea.", Mood).content.mood == "calm"
    assert "topics" in system(model.turns[0])
