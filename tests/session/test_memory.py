"""Sessions whose conversations stay within some bytes: what is chosen for a size, and a conversation that outgrows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchard
from orchard.core.errors import OrchardError, UnsupportedPair, UsageError
from orchard.session.memory import Memory, Remembering, utterances_of
from orchard.session.options import GenerationOptions
from orchard.testing import ScriptedModel

SHORT = GenerationOptions(maximum_response_tokens=4)


def test_what_makes_no_sense_is_refused_at_once() -> None:
    for wrong, words in (("many", "no size"), (0, "no size"), (True, "no size"), (Memory, "no size")):
        with pytest.raises(UsageError, match=words):
            orchard.Session(model=ScriptedModel([]), memory=wrong)
    with pytest.raises(UsageError, match="no memory policy"):
        Memory("64MB", policy="all")
    with pytest.raises(UsageError, match="no memory codec"):
        Memory("64MB", codec="zip")
    with pytest.raises(UnsupportedPair, match="keeps its own memory"):
        orchard.Session(model=ScriptedModel([]), memory="64MB").respond("Hello")


def test_what_was_asked_can_be_written_down() -> None:
    memory = Memory("64MB", policy="episodic", folder=Path("x"))
    assert Memory.from_dict(memory.to_dict()) == Memory("64MB", policy="episodic", folder="x")
    assert Memory.of("1MB").bytes == Memory.of(1_000_000).bytes == 1_000_000


@pytest.mark.real
def test_a_conversation_outgrows_its_memory_and_goes_on(smollm2: Path, tmp_path: Path) -> None:
    model = orchard.load("smollm2")
    with orchard.Session("Be brief.", model=model, memory="5MB", guardrails=None, options=SHORT) as session:
        assert session.memory is not None
        chosen = session.memory.chosen
        assert chosen.codec == "int8" and chosen.policy == "kvzip" and chosen.bytes <= 5_000_000
        assert f"{chosen.budget:,} tokens stay" in repr(session.memory)
        for turn in range(5):
            session.respond(
                f"Remember number {turn}: the red house by the river has {turn + 3} windows and a blue door."
            )
        facts = session.memory.facts()
        assert facts["tokens"] > chosen.budget and facts["forgotten"] and not facts["restarts"]
        assert facts["bytes"] == chosen.bytes and facts["peak_tokens"] <= chosen.budget + chosen.block
        with pytest.raises(UsageError, match="chosen when it begins"):
            session.memory = "12MB"
        session.save(tmp_path / "talk.json")
        said = session.transcript.copy()
        first = session.respond("How many windows?").text
    again = orchard.Session.resume(tmp_path / "talk.json", model=model, guardrails=None)
    assert again.memory is not None and again.transcript == said
    assert again.respond("How many windows?").text == first and again.usage.cached > 0
    assert again.memory.facts()["restarts"] == 0
    with pytest.raises(UsageError, match="too few to talk"):
        Remembering(model, Memory("1MB"))
    cut = utterances_of(model.tokenizer)(model.prompt_ids("Hello there"))
    assert [one.text for one in cut if "Hello" in one.text] and sum(len(one.tokens) for one in cut) == len(
        model.prompt_ids("Hello there")
    )


@pytest.mark.real
def test_without_an_embedder_words_are_told_apart_and_that_is_said(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orchard.session.embedder as embedders

    def missing(name: str) -> None:
        raise OrchardError("not here")

    monkeypatch.setattr(embedders, "load_embedder", missing)
    model = orchard.load("smollm2")
    found = Remembering(model, Memory("8MB", policy="episodic"))
    assert "words, without meaning" in str(found.chosen) and "orchard pull minilm" in str(found.chosen)
    with pytest.raises(OrchardError, match="not here"):
        Remembering(model, Memory("8MB", policy="episodic", embedder="minilm"))
