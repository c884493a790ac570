"""Transcripts and policies with the tokens of the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchard
from orchard.session.policies import RollingWindow, Room, fit
from orchard.session.transcript import Entry, Instructions, Prompt, Response, Transcript
from orchard.text.chat import chat_ids


@pytest.mark.real
def test_a_window_that_is_full_but_not_too_full(smollm2: Path) -> None:
    tokenizer = orchard.load(smollm2).tokenizer
    tokens = Room(120, lambda given: len(chat_ids(tokenizer, given.messages())), reserve=20)
    turns: list[Entry] = [make(f"number {n}") for n in range(20) for make in (Prompt, Response)]
    transcript = Transcript([Instructions("Be brief."), *turns, Prompt("And now?")])
    fitted = fit(RollingWindow(), transcript, tokens)
    assert fitted.transcript[0] is transcript[0] and fitted.transcript[-1] is transcript[-1]
    assert 2 < len(fitted.transcript) < len(transcript) and tokens(fitted.transcript) >= 0
    one_more = [entry for entry in transcript if entry.id not in fitted.dropped[:-2]]
    assert tokens(Transcript(one_more)) < 0
