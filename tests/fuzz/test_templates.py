"""A short run of the template fuzzer; `template_fuzz.py` is the long one."""

from __future__ import annotations

import time

import pytest

from orchard.text.limits import Limits
from tests.fuzz import template_fuzz, template_grammar


def test_hostile_templates_give_text_or_a_typed_error() -> None:
    outcomes, slowest = template_fuzz.run(200, 0, limits=Limits(seconds=0.05))
    assert sum(outcomes.values()) == 200
    # The clock is set short to keep this test short. Neither so gentle that all render nor so rough that none does.
    assert outcomes["rendered"] > 20 and outcomes["refused (template)"] > 50
    assert slowest < template_fuzz.TIME_LIMIT


def test_cases_depend_on_seed_and_number_only() -> None:
    assert template_fuzz.make_case(3, 17) == template_fuzz.make_case(3, 17)
    assert template_fuzz.make_case(3, 17) != template_fuzz.make_case(4, 17)


@pytest.mark.parametrize("template", template_grammar.REAL)
def test_the_real_templates_render(template: str) -> None:
    """The seeds of the mutations are sound, so that a mutation is a small step from something that works."""
    assert template_fuzz.outcome(template) == "rendered"


def _untyped(*_: object) -> str:
    raise KeyError("x")


def _large(*_: object) -> str:
    return "rendered" if bytearray(100 << 20) else ""


def _slow(*_: object) -> str:
    until = time.thread_time() + 1.1
    while time.thread_time() < until:
        pass
    return "rendered"


def _endless(*_: object) -> str:
    raise template_fuzz.Hang


@pytest.mark.parametrize("fault", [_untyped, _large, _slow, _endless])
def test_the_fuzzer_notices(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_fuzz, "outcome", fault)
    with pytest.raises(SystemExit):
        template_fuzz.run(1, 0)


def test_python_insides_in_the_output_count_as_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_fuzz, "render", lambda *_, **__: "<function f at 0x7f>")
    with pytest.raises(SystemExit):
        template_fuzz.run(1, 0)
