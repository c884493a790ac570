"""What a guard says: a verdict, the violations in it, why in plain words, and a record that holds none of the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchard.core.frozen import frozen
from orchard.session.errors import GuardrailViolationError, RefusalError

Stage = Literal["input", "output", "tool", "instructions"]
"""Where a text comes from: the user, the model, a tool (its arguments and results), or the developer, who is never checked."""
Action = Literal["allow", "flag", "block"]
DENY = "deny_list"
_FILE = Path(__file__).resolve().parent / "categories.json"
_WHERE = {"input": "The request", "output": "The answer", "tool": "What went to or came from a tool"}


@frozen
class Category:
    """A kind of harm. `hazard` is its name in the MLCommons taxonomy, where it has one; `stages`: where it is looked for."""

    name: str
    hazard: str | None
    words: str
    advice: str
    stages: frozenset[str]


@lru_cache(maxsize=1)
def categories() -> Mapping[str, Category]:
    """All categories of `categories.json`, by name."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: Category(
                name,
                facts["hazard"],
                facts["words"],
                facts["advice"],
                frozenset(facts.get("stages", ("input", "output", "tool"))),
            )
            for name, facts in data.items()
        }
    )


@frozen
class Violation:
    """One thing against the policy. `span`: where in the text it is; `rule`: what found it; `action`: what the policy says."""

    category: str
    score: float
    span: tuple[int, int]
    rule: str
    stage: Stage
    explanation: str
    action: Action = "block"

    @property
    def hazard(self) -> str | None:
        """The category's name in the MLCommons taxonomy."""
        found = categories().get(self.category)
        return found.hazard if found else None

    @property
    def advice(self) -> str:
        """What a person can do next."""
        found = categories().get(self.category)
        return found.advice if found else "Leave out what the application does not allow."

    def to_dict(self) -> dict[str, Any]:
        """Everything about it; nothing of the text."""
        return {
            "category": self.category,
            "hazard": self.hazard,
            "score": round(self.score, 4),
            "span": list(self.span),
            "rule": self.rule,
            "stage": self.stage,
            "action": self.action,
            "explanation": self.explanation,
        }

    def error(self) -> GuardrailViolationError:
        return GuardrailViolationError(self.explanation, violation=self, hint=self.advice)

    def refusal(self) -> RefusalError:
        """For a caller who wants to see this as the model's own refusal."""
        return RefusalError(self.explanation, [Explanation.of(self)], hint=self.advice)


def explain(category: str, stage: Stage) -> str:
    """A violation in plain words."""
    found = categories().get(category)
    what = found.words if found else "holds something that this application does not allow"
    return f"{_WHERE.get(stage, 'The text')} {what}."


@frozen
class Explanation:
    """Why something was refused. It can stand in `RefusalError.explanation_entries`; `text` is for people."""

    text: str
    category: str
    hazard: str | None
    stage: str
    rule: str
    score: float
    advice: str

    @classmethod
    def of(cls, violation: Violation) -> Explanation:
        text = f"{violation.explanation} {violation.advice}"
        return cls(
            text,
            violation.category,
            violation.hazard,
            violation.stage,
            violation.rule,
            violation.score,
            violation.advice,
        )

    def __str__(self) -> str:
        return self.text


@frozen
class Verdict:
    """What a guard says of a whole text. `violations` holds what was blocked and what was only flagged."""

    allowed: bool
    violations: tuple[Violation, ...] = ()
    checked: bool = True
    """False: the check was off, or it broke and the policy lets text through all the same."""

    def raise_if_blocked(self) -> None:
        for violation in self.violations:
            if violation.action == "block":
                raise violation.error()


@frozen
class Decision:
    """A line for a log: which text (by hash), what was decided and why. It holds nothing that was said."""

    digest: str
    stage: Stage
    mode: str
    allowed: bool
    checked: bool
    categories: tuple[str, ...]
    rules: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        record = {"digest": self.digest, "stage": self.stage, "mode": self.mode, "allowed": self.allowed}
        return record | {"checked": self.checked, "categories": list(self.categories), "rules": list(self.rules)}
