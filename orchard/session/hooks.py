"""Functions of the application that a conversation calls on its way: to watch it, to change it, to stop one tool call.

A hook that raises ends the turn with its error, and the turn is not in the transcript. Several sets of hooks (of the session,
of the active profile) run one after the other; what one changes, the next sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from orchard.core.errors import UsageError
from orchard.session.errors import ToolCallError
from orchard.session.turn import Call

if TYPE_CHECKING:
    from orchard.session.streams import Response
    from orchard.session.transcript import Transcript


@dataclass(frozen=True)
class ToolDecision:
    """What becomes of one tool call. Make one with `approve`, `reject` or `edit`."""

    kind: Literal["approve", "reject", "edit"]
    reason: str = ""
    """For a rejected call: what the model is told instead of a result."""
    arguments: str = ""
    """For an edited call: the new arguments, as JSON."""


def approve() -> ToolDecision:
    """Let the call happen as the model wrote it."""
    return ToolDecision("approve")


def reject(reason: str = "this call was not allowed") -> ToolDecision:
    """The tool is not called; the model is told why and goes on."""
    return ToolDecision("reject", reason=reason)


def edit(arguments: Mapping[str, Any] | str) -> ToolDecision:
    """The tool is called with these arguments instead. They must match the tool's schema like any others."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolDecision("edit", arguments=text)


class ToolRejectedError(ToolCallError):
    """A hook did not allow a tool call."""

    code = "tool-rejected"


@dataclass(frozen=True)
class Hooks:
    """Every hook is optional. Those that may change something return the new value, or None to leave it."""

    on_prompt: Callable[[str], str | None] | None = None
    """The text of a prompt, before guardrails see it."""
    on_response: Callable[[Response], Any] | None = None
    """The whole response, before it joins the transcript: raising here discards the turn."""
    on_reasoning: Callable[[str], Any] | None = None
    """More of what the model thinks, as it comes."""
    on_tool_call: Callable[[Call], ToolDecision | Mapping[str, Any] | bool | None] | None = None
    """One tool call before it happens. None, True or `approve()` lets it happen, False or `reject(…)` does not, a dict of
    arguments or `edit(…)` changes it."""
    on_tool_output: Callable[[Call, str], str | None] | None = None
    """What a tool gave (or why it failed), before the model reads it."""
    on_activate: Callable[[Any], Any] | None = None
    """A profile that was not active before this turn and is now."""
    on_deactivate: Callable[[Any], Any] | None = None
    history_transform: Callable[[Transcript], Transcript] | None = None
    """The transcript as the model will see it, a copy that may be changed; the session keeps its own whole."""

    def __post_init__(self) -> None:
        for one in fields(self):
            given = getattr(self, one.name)
            if given is not None and not callable(given):
                raise UsageError(f"the hook {one.name} is {given!r}", hint="a hook is a function")

    @classmethod
    def of(cls, given: Hooks | Mapping[str, Any] | None) -> Hooks:
        """Hooks from a dict of functions by name, or as they are."""
        if given is None or isinstance(given, Hooks):
            return given or cls()
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise UsageError(f"no hook called {unknown[0]!r}", hint="hooks are " + ", ".join(known))
        return cls(**given)

    def with_(self, **changes: Any) -> Hooks:
        return replace(self, **changes)


class HookChain:
    """The hooks in force for one turn, in order."""

    def __init__(self, *sets: Hooks) -> None:
        self.sets = sets

    def prompt(self, text: str) -> str:
        for hook in self._named("on_prompt"):
            changed = hook(text)
            text = text if changed is None else _text("on_prompt", changed)
        return text

    def response(self, response: Response) -> None:
        for hook in self._named("on_response"):
            hook(response)

    def reasoning(self, delta: str) -> None:
        for hook in self._named("on_reasoning"):
            hook(delta)

    def tool_call(self, call: Call) -> tuple[Call, ToolDecision]:
        """The call as the hooks left it, and whether it may happen. The first to reject it has the last word."""
        verdict = approve()
        for hook in self._named("on_tool_call"):
            decision = _decision(hook(call))
            if decision.kind == "reject":
                return call, decision
            if decision.kind == "edit":
                call, verdict = replace(call, arguments=decision.arguments), decision
        return call, verdict

    def tool_output(self, call: Call, output: str) -> str:
        for hook in self._named("on_tool_output"):
            changed = hook(call, output)
            output = output if changed is None else _text("on_tool_output", changed)
        return output

    def activate(self, profile: Any) -> None:
        for hook in self._named("on_activate"):
            hook(profile)

    def deactivate(self, profile: Any) -> None:
        for hook in self._named("on_deactivate"):
            hook(profile)

    def history(self, transcript: Transcript) -> Transcript:
        for hook in self._named("history_transform"):
            changed = hook(transcript)
            if changed is not None:
                transcript = changed
        return transcript

    def transforms_history(self) -> bool:
        return any(True for _ in self._named("history_transform"))

    def _named(self, name: str) -> list[Callable[..., Any]]:
        return [hook for hooks in self.sets if (hook := getattr(hooks, name)) is not None]


def _decision(given: Any) -> ToolDecision:
    if isinstance(given, ToolDecision):
        return given
    if given is None or given is True:
        return approve()
    if given is False:
        return reject()
    if isinstance(given, Mapping):
        return edit(given)
    raise UsageError(
        f"on_tool_call returned {given!r}",
        hint="return approve(), reject(reason), edit(arguments), a dict, a bool or None",
    )


def _text(hook: str, given: Any) -> str:
    if not isinstance(given, str):
        raise UsageError(f"{hook} returned {type(given).__name__}", hint="return a text, or None to leave it as it is")
    return given
