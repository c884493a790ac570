"""Every typed error says what to do next, has a stable code of its own and a known exit code."""

from __future__ import annotations

import copy
import inspect
import json
import re

import pytest

from orchard.core import errors
from orchard.core.errors import ContextOverflow, OrchardError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OrchardError)]


def make(kind: type[OrchardError]) -> OrchardError:
    if kind is ContextOverflow:
        return ContextOverflow(tokens=1200, limit=1000)
    return kind("what happened", hint="what to do")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_contract_of_every_error(kind: type[OrchardError]) -> None:
    error = make(kind)
    assert isinstance(error, Exception) and kind.__doc__
    assert str(error) and "\n" not in str(error) and error.hint
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error.code)
    assert error.exit_code in (1, 2, 130) and isinstance(error.retryable, bool)
    data = json.loads(json.dumps(error.to_dict()))
    assert data == {"code": error.code, "message": str(error), "hint": error.hint, "retryable": error.retryable}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_errors_survive_a_process_border(kind: type[OrchardError]) -> None:
    error = make(kind)
    again = copy.copy(error)  # by the same road as a worker's answer
    assert type(again) is kind and again.__dict__ == error.__dict__ and str(again) == str(error)


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes) > 10


def test_an_overflow_carries_its_counts_and_a_default_hint() -> None:
    error = make(ContextOverflow)
    assert isinstance(error, ContextOverflow) and (error.tokens, error.limit) == (1200, 1000)
    assert "1,200" in str(error) and "1,000" in str(error) and "200" in error.hint
    assert ContextOverflow(tokens=2, limit=1, hint="ask for less").hint == "ask for less"


def test_related_errors_can_be_caught_together() -> None:
    assert issubclass(errors.UnsupportedPair, errors.ConfigError)
    assert issubclass(errors.UnknownArchitecture, errors.BadFile) and issubclass(
        errors.UnsupportedFormat, errors.BadFile
    )
