"""Guardrails: every request and every answer of a session is held against a policy, on this machine and without a network.

    guard = Guardrails()                                       # on, for all categories
    guard.check("how do I kill a process?").allowed            # True
    Guardrails("permissive")                                   # plain text is flagged, never stopped
    Guardrails(categories={"violence": "allow", "sexual": 0.8}, deny=["project x"], allow=["kill switch"])

The developer's instructions are not checked. A guard that breaks lets nothing through (`GuardUnavailable`), unless it is
told to fail open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from orchard.core.digest import sha256
from orchard.core.errors import OrchardError
from orchard.session.guardrails.errors import GuardUnavailable, PolicyConfigError
from orchard.session.guardrails.judge import Judge
from orchard.session.guardrails.policy import Policy
from orchard.session.guardrails.verdict import Decision, Stage, Verdict, Violation
from orchard.session.guardrails.watch import Watch

OnFailure = Literal["closed", "open"]
STAGES: tuple[str, ...] = get_args(Stage)


class Guardrails:
    """A policy with everything needed to apply it. It holds no text, and threads can share it.

    `categories`: overrides by name, see `Policy.of`. `deny`: words and phrases that are never let through; `allow`:
    phrases that are not held against a text. `log` is called with a `Decision` for every text; it holds none of the text.
    """

    def __init__(
        self,
        mode: str = "default",
        categories: Mapping[str, Any] | None = None,
        deny: Sequence[str] = (),
        allow: Sequence[str] = (),
        *,
        on_failure: OnFailure = "closed",
        log: Callable[[Decision], None] | None = None,
        normalise: bool = True,
    ) -> None:
        if on_failure not in get_args(OnFailure):
            raise PolicyConfigError(f"on_failure is {on_failure!r}", hint="closed or open")
        self.policy = Policy.of(mode, categories)
        self.deny, self.allow = _phrases("deny", deny), _phrases("allow", allow)
        self.on_failure: OnFailure = on_failure
        self._log = log
        self.judge = Judge(self.policy, self.deny, self.allow, normalise)

    @classmethod
    def of(cls, wish: Guardrails | str | int | None) -> Guardrails:
        """Guardrails from what people write: a mode, the SDK's numbers (0: default, 1: permissive), or None for default."""
        if isinstance(wish, Guardrails):
            return wish
        if isinstance(wish, int):
            return cls({0: "default", 1: "permissive"}.get(int(wish), str(wish)))
        return cls() if wish is None else cls(wish)

    @property
    def mode(self) -> str:
        return self.policy.mode

    def __repr__(self) -> str:
        return f"Guardrails({self.mode!r}, deny={len(self.deny)}, allow={len(self.allow)})"

    def check(self, text: str, stage: Stage = "input", *, structured: bool = False, context: str = "") -> Verdict:
        """Judge a whole text. `structured`: for an answer, that it is JSON, whose texts are read as a reader of the object
        would; for a request, that the answer to it will be structured. `context`: what was said before, of which the end is
        looked at together with the beginning of the text."""
        if not self._active(stage):
            return self._decided(text, stage, Verdict(True, checked=False))
        try:
            watch = Watch(self.judge, stage, structured, json=structured and _like_json(text), context=context)
            watch.push(text)
            watch.finish()
        except Exception as error:
            return self._decided(text, stage, self._broken(error))
        stopped = any(violation.action == "block" for violation in watch.violations)
        return self._decided(text, stage, Verdict(not stopped, tuple(watch.violations)))

    def require(self, text: str, stage: Stage = "input", *, structured: bool = False, context: str = "") -> Verdict:
        """`check`, and `GuardrailViolationError` where the text is not allowed."""
        verdict = self.check(text, stage, structured=structured, context=context)
        verdict.raise_if_blocked()
        return verdict

    def stream(self, stage: Stage = "output", *, structured: bool = False, context: str = "") -> StreamGuard:
        """A guard for one answer that comes in pieces."""
        active = self._active(stage)
        watch = Watch(self.judge, stage, structured, json=structured, context=context) if active else None
        return StreamGuard(self, watch, stage)

    def _active(self, stage: Stage) -> bool:
        if stage not in STAGES:
            raise PolicyConfigError(f"there is no stage {stage!r}", hint="one of " + ", ".join(STAGES))
        return stage != "instructions" and self.mode != "off"

    def _broken(self, error: Exception) -> Verdict:
        """What is said when the check itself fails."""
        if self.on_failure == "open":
            return Verdict(True, checked=False)
        why = error.message if isinstance(error, OrchardError) else type(error).__name__  # no text of the user's
        raise GuardUnavailable(
            f"the safety check could not be made: {why}", hint="install the package again, or see on_failure"
        ) from error

    def _decided(self, text: str, stage: Stage, verdict: Verdict) -> Verdict:
        if self._log is not None:
            found = verdict.violations
            self._log(
                Decision(
                    digest=sha256(text.encode("utf-8", "surrogatepass")).hex()[:16],
                    stage=stage,
                    mode=self.mode,
                    allowed=verdict.allowed,
                    checked=verdict.checked,
                    categories=tuple(dict.fromkeys(violation.category for violation in found)),
                    rules=tuple(dict.fromkeys(violation.rule for violation in found)),
                )
            )
        return verdict


class StreamGuard:
    """Holds back the sentence that is being written until it has been judged, so that nothing unsafe is ever shown."""

    def __init__(self, guard: Guardrails, watch: Watch | None, stage: Stage) -> None:
        self._guard, self._watch, self._stage = guard, watch, stage
        self._held = ""
        self._shown = 0
        self._all: list[str] = []
        self._stopped: Violation | None = None
        self._checked = watch is not None

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What was flagged so far, and what stopped the answer."""
        return tuple(self._watch.violations) if self._watch is not None else ()

    @property
    def held(self) -> str:
        """What has been pushed and not been given out yet."""
        return self._held

    def push(self, delta: str) -> str:
        """More of the answer; what of it may be shown by now. `GuardrailViolationError` where it must stop."""
        return self._step(delta, last=False)

    def finish(self) -> str:
        """The answer is complete: the rest of what may be shown."""
        rest = self._step("", last=True)
        self._report(True)
        return rest

    def _step(self, delta: str, last: bool) -> str:
        if self._stopped is not None:
            raise self._stopped.error()
        if self._guard._log is not None:
            self._all.append(delta)
        self._held += delta
        if self._watch is None:
            return self._release(len(self._held))
        try:
            found = self._watch.push(delta)
            found = [*found, *self._watch.finish()] if last else found
        except Exception as error:
            self._held = self._held if self._guard.on_failure == "open" else ""
            self._guard._broken(error)
            self._watch, self._checked = None, False
            return self._release(len(self._held))
        self._stopped = next((violation for violation in found if violation.action == "block"), None)
        if self._stopped is not None:
            self._held = ""
            self._report(False)
            raise self._stopped.error()
        return self._release(self._watch.clear - self._shown)

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._shown += len(shown)
        return shown

    def _report(self, allowed: bool) -> None:
        self._guard._decided("".join(self._all), self._stage, Verdict(allowed, self.violations, self._checked))


def _phrases(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(entry, str) and entry.strip() for entry in given):
        raise PolicyConfigError(f"{name} is no list of words and phrases", hint='such as ["project x"]')
    return tuple(given)


def _like_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[", '"')
