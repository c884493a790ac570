"""What is done about which category, and from what score on: four modes, and overrides for single categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from orchard.core.frozen import frozen
from orchard.session.guardrails.errors import PolicyConfigError
from orchard.session.guardrails.verdict import DENY, Action, categories

Mode = Literal["default", "permissive", "strict", "off"]
MODES: tuple[str, ...] = get_args(Mode)
ACTIONS: tuple[str, ...] = get_args(Action)
THRESHOLDS = {"default": 0.55, "permissive": 0.55, "strict": 0.3, "off": 1.0}
"""From what score on a text counts. Chosen on sentences of our own and on public sets (see bench/guardrails.py)."""


@frozen
class Setting:
    """What is done about one category."""

    action: Action = "block"
    threshold: float = THRESHOLDS["default"]


@frozen
class Policy:
    """A mode and a setting for every category.

    default: everything is blocked. strict: the same, from lower scores on. permissive: as default for structured answers,
    while plain text is flagged and never blocked (for rewriting or summing up what a user has written). off: nothing is
    checked.
    """

    mode: Mode
    settings: Mapping[str, Setting]

    @classmethod
    def of(cls, mode: str, overrides: Mapping[str, Any] | None = None) -> Policy:
        """`overrides`: by category an action ("allow", "flag", "block"), a threshold from 0 to 1, or a `Setting`."""
        if mode not in MODES:
            raise PolicyConfigError(f"there is no guardrail mode {mode!r}", hint="one of " + ", ".join(MODES))
        settings = {name: Setting(threshold=THRESHOLDS[mode]) for name in (*categories(), DENY)}
        for name, wish in (overrides or {}).items():
            if name not in settings:
                raise PolicyConfigError(
                    f"there is no guardrail category {name!r}", hint="one of " + ", ".join(sorted(settings))
                )
            settings[name] = _setting(name, wish, settings[name])
        return cls(mode, settings)  # type: ignore[arg-type]

    def action(self, category: str, score: float, structured: bool) -> Action:
        """What to do about a score; "allow" below the threshold."""
        setting = self.settings[category]
        if self.mode == "off" or score < setting.threshold:
            return "allow"
        return "flag" if setting.action == "block" and self.mode == "permissive" and not structured else setting.action


def _setting(name: str, wish: Any, usual: Setting) -> Setting:
    setting = wish
    if isinstance(wish, str):
        setting = replace(usual, action=wish)  # type: ignore[arg-type]  # checked below
    elif isinstance(wish, (int, float)) and not isinstance(wish, bool):
        setting = replace(usual, threshold=float(wish))
    if not isinstance(setting, Setting):
        raise PolicyConfigError(f"{wish!r} says nothing about {name}", hint="give an action, a threshold or a Setting")
    if setting.action not in ACTIONS:
        raise PolicyConfigError(f"{name}: there is no action {setting.action!r}", hint="one of " + ", ".join(ACTIONS))
    if not 0 <= setting.threshold <= 1:
        raise PolicyConfigError(f"{name}: the threshold {setting.threshold} is no chance", hint="from 0 to 1")
    return setting
