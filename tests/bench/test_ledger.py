"""The task of the adapter benchmark: made from a seed, without overlap, and as its format says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[2] / "bench" / "data" / "ledger.py"


def ledger() -> Any:
    import sys

    spec = importlib.util.spec_from_file_location("ledger_task", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ledger_task"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_sets_are_made_from_the_seed_and_do_not_meet() -> None:
    task = ledger()
    training, tests = task.examples()
    assert (len(training), len(tests)) == (200, 100)
    assert task.examples() == (training, tests) and task.examples(seed=1) != (training, tests)
    assert task.examples(training=50)[0] == training[:50]
    assert not {one.prompt for one in training} & {one.prompt for one in tests}
    assert not {one.answer for one in training} & {one.answer for one in tests}
    seen = " ".join(one.prompt for one in training)
    assert not any(name in seen for name in task.UNSEEN.split())
    assert sum(any(name in one.prompt for name in task.UNSEEN.split()) for one in tests) >= 10


def test_answers_have_the_form_and_say_what_the_message_says() -> None:
    task = ledger()
    form = re.compile(r"20\d\d-[01]\d-[0-2]\d \| [A-Z]\w+, [A-Z]\. \| [1-9]\d*\.\d\d (EUR|USD|GBP) \| \w[\w ]+")
    for one in (*task.examples()[0], *task.examples()[1]):
        assert form.fullmatch(one.answer), one
        date, name, amount, purpose = one.answer.split(" | ")
        assert purpose in one.prompt and name.partition(",")[0] in one.prompt and date[:4] in one.prompt
        units = amount.partition(".")[0]
        assert units in one.prompt or f"{int(units):,}" in one.prompt
        assert one.row()["messages"][1]["content"] == one.answer
