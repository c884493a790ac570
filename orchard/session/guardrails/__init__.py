"""Safety checks of what goes into a model and what comes out: on by default, tunable, explained, without a network."""

from __future__ import annotations

from orchard.session.guardrails.errors import GuardUnavailable, PolicyConfigError
from orchard.session.guardrails.guard import Guardrails, StreamGuard
from orchard.session.guardrails.policy import Policy, Setting
from orchard.session.guardrails.verdict import Category, Decision, Explanation, Verdict, Violation, categories

__all__ = [
    "Category",
    "Decision",
    "Explanation",
    "GuardUnavailable",
    "Guardrails",
    "Policy",
    "PolicyConfigError",
    "Setting",
    "StreamGuard",
    "Verdict",
    "Violation",
    "categories",
]
