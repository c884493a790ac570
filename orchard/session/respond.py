"""The loop behind every answer: one prompt in, one response out, however many steps and tool calls lie between.

prompt → guardrail on the input → the context policy fits the transcript → a `Turn` for the executor → its events, the output
guardrail on the way → tools are called and the model goes on → the text becomes what was asked for.

It is a generator: what streams takes the snapshots, what does not runs it to its end. It changes no transcript; the session
does, when all went well.
"""

from __future__ import annotations

import contextvars
import json
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from orchard.core.errors import Cancelled, UsageError
from orchard.session.errors import (
    DecodingFailureError,
    GenerationError,
    GuardrailViolationError,
    RefusalError,
    ToolCallError,
)
from orchard.session.hooks import ToolRejectedError
from orchard.session.profiles import Setup
from orchard.session.streams import Collected, Response, Snapshot, Wanted
from orchard.session.turn import Call, Done, Event, Executor, Reasoning, Text, ToolSpec, Turn, Usage
from orchard.text.messages import Message

if TYPE_CHECKING:
    from orchard.session.schema import PartialReader
    from orchard.session.tools import ToolResult
    from orchard.session.transcript import Transcript
    from orchard.session.transcript.entries import Entry

ANSWERING: contextvars.ContextVar[frozenset[object]] = contextvars.ContextVar("answering", default=frozenset())
"""Keys of the sessions whose tools are running here: a tool that asks its own session would wait for itself."""


class TooManyStepsError(GenerationError):
    """The model called tools again and again, as often as it may, and never answered."""

    code = "too-many-steps"


class Reply:
    """One prompt and what becomes of it. `entries` are what the turn adds to the transcript, `usage` what it has cost so far;
    both are there also when it failed."""

    def __init__(
        self, setup: Setup, history: Sequence[Entry], prompt: str, wanted: Wanted, cancel: threading.Event
    ) -> None:
        self.setup = setup
        self.history = list(history)
        """The entries before this turn, as the context policy left them."""
        self.prompt = prompt
        self.wanted = wanted
        self.cancel = cancel
        self.entries: list[Entry] = []
        self.usage = Usage()
        self.dropped: list[str] = []
        self.tool_errors: list[ToolCallError] = []
        self.reasoning = ""
        self.said = ""
        """Text of the step that is on its way, as far as it was shown."""

    def so_far(self) -> list[Entry]:
        """For a turn that broke off: what there was, the words of an unfinished answer included."""
        from orchard.session.transcript.entries import Response as Said

        return [*self.entries, Said(self.said)] if self.said else self.entries

    def run(self) -> Generator[Snapshot, None, Response]:
        from orchard.session.transcript.entries import PromptEntry

        text = self.setup.hooks.prompt(self.prompt)
        before = next((entry.text for entry in reversed(self.history) if isinstance(entry, PromptEntry)), "")
        self._judge(text, "input", structured=self.wanted.schema is not None, context=before)
        self.entries.append(PromptEntry(text, self.setup.options.to_dict(), self.wanted.format()))
        last = yield from self._steps()
        content, raw = self.wanted.read(last.text, last.finish)
        self._record_answer(last)
        response = Response(
            content=content,
            raw_content=raw,
            text=last.text,
            usage=self.usage,
            transcript_entries=tuple(self.entries),
            finish=last.finish,
            seed=last.seed if last.seed is not None else self.setup.seed,
            logprobs=None if self.setup.options.logprobs is None else tuple(last.logprobs),
            reasoning=self.reasoning,
            tool_errors=tuple(self.tool_errors),
            dropped=tuple(self.dropped),
        )
        self.setup.hooks.response(response)
        return response

    def _steps(self) -> Generator[Snapshot, None, Collected]:
        """Steps of the model until one gives an answer and calls nothing."""
        for number in range(self.setup.max_steps):
            mode = self._mode(number)
            step = yield from self._step(mode)
            if not step.calls and mode not in ("allowed", "disallowed"):
                raise DecodingFailureError(
                    "a tool was to be called and the model gave no whole call",
                    raw=step.text,
                    hint="allow more tokens (maximum_response_tokens), or let the model decide",
                )
            if not step.calls:
                return step
            self._record_calls(step)
            self._call_tools(step.calls)
        if self.setup.at_limit == "error" and self.wanted.constraint is None and self.setup.max_steps > 0:
            raise TooManyStepsError(
                f"the model called tools in {self.setup.max_steps} steps and did not answer",
                hint="raise max_steps, or give the session at_limit='answer' to end with an answer without tools",
            )
        # A guided call promised an answer of its form: with the tools taken away the model must give one.
        step = yield from self._step("disallowed")
        return step

    def _mode(self, number: int) -> str:
        """The tool mode of a step. What was required has been done after the first steps, and the model may answer."""
        mode, names = self.setup.options.tool_mode, [spec.name for spec in self.setup.specs()]
        if mode == "disallowed" or (mode == "allowed" and not names):
            return "disallowed"
        if mode == "allowed":
            return mode
        if not names or (mode != "required" and mode not in names):
            known = ", ".join(names) or "none"
            missing = "a tool call is required" if mode == "required" else f"the tool {mode!r} must be called"
            raise UsageError(
                f"{missing}, but the tools here are: {known}", hint="give the session or the call that tool"
            )
        required = self.setup.required_steps
        return mode if required is None or number < required else "allowed"

    def _step(self, mode: str) -> Generator[Snapshot, None, Collected]:
        """One call of the model."""
        turn = self._turn(mode)
        step = Collected()
        schema, guardrails = self.wanted.schema, self.setup.guardrails
        guard = guardrails.stream(structured=schema is not None) if guardrails is not None else None
        partial = schema.reader() if schema is not None else None
        rest = ""
        shown = Snapshot("" if partial is None else None)
        events = self.setup.executor.run(turn, self.cancel)
        try:
            for event in events:
                if isinstance(event, Text):
                    step.text += event.delta
                    step.logprobs += event.logprobs
                    delta = event.delta if guard is None else guard.push(event.delta)
                    if delta:
                        shown = _snapshot(shown, delta, partial)
                        self.said = shown.text
                        yield shown
                else:
                    self._other(event, step)
            if guard is not None:
                rest = guard.finish()
        except RefusalError as refusal:
            _explain(refusal)
            raise
        except GuardrailViolationError as violated:
            raise _violated(violated.violation, "the answer") from None
        finally:
            _close(events)
        step.text = shown.text + rest  # what the guardrail let through
        if self.cancel.is_set() or step.finish == "cancelled":
            raise Cancelled("the answer was cancelled", hint="the turn is not in the transcript; ask again")
        if not step.calls:
            yield replace(_snapshot(shown, rest, partial, last=True), usage=self.usage)
        return step

    def _other(self, event: Event, step: Collected) -> None:
        if isinstance(event, Reasoning):
            step.reasoning += event.delta
            self.reasoning += event.delta
            self.setup.hooks.reasoning(event.delta)
        elif isinstance(event, Call):
            step.calls.append(event)
        elif isinstance(event, Done):
            step.finish, step.seed = event.finish, event.seed
            self.usage = self.usage + event.usage

    def _turn(self, mode: str) -> Turn:
        options = self.setup.options
        specs = self.setup.specs() if mode != "disallowed" else ()
        return Turn(
            messages=tuple(self._messages(specs)),
            tools=specs,
            tool_mode=mode,
            parallel_calls=self.setup.parallel,
            constraint=self.wanted.constraint,
            sampling=options.sampling_of(),
            max_tokens=options.maximum_response_tokens,
            seed=self.setup.seed,
            stop=tuple(options.stop or ()),
            logprobs=options.logprobs,
            adapters=self.setup.adapters,
            reasoning=self.setup.reasoning,
            metadata=self.setup.metadata,
        )

    def _messages(self, specs: Sequence[ToolSpec]) -> list[Message]:
        """What the model reads: the transcript as hooks and policy leave it, and the words about the wanted form."""
        from orchard.session.policies import Room, Strict, fit
        from orchard.session.transcript import Transcript

        whole = Transcript([*self.history, *self.entries])
        if isinstance(self.setup.policy, Strict | None):  # the executor itself refuses what is too long
            return self._shown(whole)
        limit = self.setup.executor.context_size
        reserve = self.setup.options.maximum_response_tokens or min(512, limit // 4)
        room = Room(limit, lambda transcript: self.setup.executor.count(self._shown(transcript), specs), reserve)
        fitted = fit(self.setup.policy, whole, room, summarise=self._summarise)
        self.dropped += [id for id in fitted.dropped if id not in self.dropped]
        mine = {entry.id for entry in self.entries}
        self.history = [entry for entry in fitted.transcript if entry.id not in mine]
        return self._shown(fitted.transcript)

    def _summarise(self, prompt: str) -> str:
        """For policies that ask a model: one plain question, outside the conversation."""
        executor = summariser(self.setup.policy) or self.setup.executor
        turn = Turn((Message("user", prompt),), tool_mode="disallowed", seed=self.setup.seed, max_tokens=512)
        text = ""
        for event in executor.run(turn, self.cancel):
            if isinstance(event, Text):
                text += event.delta
            elif isinstance(event, Done):
                self.usage = self.usage + event.usage
        return text

    def _shown(self, transcript: Transcript) -> list[Message]:
        hooks = self.setup.hooks
        if hooks.transforms_history():
            transcript = hooks.history(transcript.copy())
        messages = list(transcript.messages())
        words = self.wanted.words() if self.setup.context.include_schema_in_prompt else ""
        for place in reversed(range(len(messages) if words else 0)):
            if messages[place].role == "user":
                messages[place] = replace(messages[place], content=f"{messages[place].content}\n\n{words}")
                break
        return messages

    def _record_calls(self, step: Collected) -> None:
        from orchard.session.transcript.entries import ToolCall, ToolCalls

        self._record_answer(step)
        self.entries.append(ToolCalls([_recorded(ToolCall, call) for call in step.calls]))

    def _record_answer(self, step: Collected) -> None:
        """Thoughts and words of a step; a guided answer as structure."""
        from orchard.session.transcript import entries as made

        if step.reasoning:
            self.entries.append(made.Reasoning(step.reasoning))
        if step.calls and not step.text:
            return
        if self.wanted.schema is not None and not step.calls:
            structure = made.StructureSegment(self.wanted.schema.name, json.loads(step.text))
            self.entries.append(made.Response([structure]))
        else:
            self.entries.append(made.Response(step.text))
        self.said = ""

    def _call_tools(self, calls: Sequence[Call]) -> None:
        """Run the calls of one step, several at once, and record what they gave in the order in which they were made."""
        from orchard.session.transcript.entries import ToolOutput

        decided = [self.setup.hooks.tool_call(call) for call in calls]
        allowed = [call for call, decision in decided if decision.kind != "reject"]
        for call in allowed:  # all of them are judged before any of them happens
            self._judge(call.arguments, "tool", structured=True)
        jobs = iter([_Job(self.setup, call) for call in allowed])
        for call, decision in decided:
            if decision.kind == "reject":
                error: ToolCallError | None = ToolRejectedError(call.name, PermissionError(decision.reason))
                output = f"Tool error: {decision.reason}"
            else:
                result = next(jobs).result(self.cancel)
                error, output = result.error, result.content
            if error is not None:
                self.tool_errors.append(error)
            output = self.setup.hooks.tool_output(call, output)
            self._judge(output, "tool")
            self.entries.append(ToolOutput(call.name, output, call.id))

    def _judge(self, text: str, stage: Literal["input", "tool"], structured: bool = False, context: str = "") -> None:
        """`context`: the prompt before, as a request may be spread over two."""
        if self.setup.guardrails is None:
            return
        verdict = self.setup.guardrails.check(text, stage=stage, structured=structured, context=context)
        if not verdict.allowed:
            stopped = [violation for violation in verdict.violations if violation.action == "block"]
            where = {"input": "the prompt", "tool": "a tool call or what it gave"}[stage]
            raise _violated(stopped[0] if stopped else None, where)


class _Job:
    """One tool call in a thread of its own, so that calls run side by side and a cancelled turn need not wait for them."""

    def __init__(self, setup: Setup, call: Call) -> None:
        self._done = threading.Event()
        self._result: ToolResult | None = None
        self._error: BaseException | None = None
        self._stop: Callable[[], None] = getattr(setup.run_async, "cancel", lambda: None)
        context = contextvars.copy_context()
        context.run(ANSWERING.set, ANSWERING.get() | {setup.key})
        work: Callable[[], None] = lambda: context.run(self._work, setup, call)  # noqa: E731
        threading.Thread(target=work, name=f"tool {call.name}", daemon=True).start()

    def _work(self, setup: Setup, call: Call) -> None:
        try:
            self._result = setup.tools.call(call.name, call.arguments, setup.tool_timeout, run_async=setup.run_async)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._done.set()

    def result(self, cancel: threading.Event) -> ToolResult:
        while not self._done.wait(0.02):
            if cancel.is_set():
                self._stop()
                raise Cancelled("the answer was cancelled while a tool was running", hint="ask again")
        if self._result is None:
            error, self._error = self._error, None
            try:
                raise error or GenerationError("a tool gave nothing", hint="report this")
            finally:
                del error
        return self._result


def _snapshot(before: Snapshot, delta: str, partial: PartialReader | None, *, last: bool = False) -> Snapshot:
    text = before.text + delta
    if partial is None:
        return Snapshot(text, None, delta, text)
    found = partial.push(delta) if delta else None
    found = (partial.finish() if last else None) or found
    if found is None:
        return replace(before, delta=delta, text=text)
    return Snapshot(found.content, found.raw, delta, text)


def _close(events: Any) -> None:
    """A generator is closed; another iterator has nothing to close."""
    close = getattr(events, "close", None)
    if close is not None:
        close()


def summariser(policy: Any) -> Executor | None:
    """The model that a policy names for its summaries, where it names one."""
    from orchard.session.assets import executor_of

    for each in (policy, *getattr(policy, "policies", ())):
        if getattr(each, "with_model", None) is not None:
            return executor_of(each.with_model)
    return None


def _recorded(kind: Any, call: Call) -> Any:
    """A call as a transcript holds it. Arguments that are no JSON object cannot be in one: they are kept beside."""
    from orchard.session.errors import TranscriptError

    try:
        return kind(call.name, call.arguments, call.id)
    except TranscriptError:
        return kind(call.name, "{}", call.id, extra={"invalidArguments": call.arguments})


def _violated(violation: Any, where: str) -> GuardrailViolationError:
    why = getattr(violation, "explanation", "") or "it is against the safety policy"
    hint = getattr(violation, "advice", "") or "rephrase it"
    return GuardrailViolationError(
        f"guardrail violation in {where}: {why}",
        violation=violation,
        hint=f"{hint} (guardrails can be tuned: see orchard.session.guardrails)",
    )


def _explain(refusal: RefusalError) -> None:
    """A refusal that says why only in its message gets an entry that says it too."""
    if not refusal.explanation_entries and refusal.message:
        from orchard.session.transcript.entries import Response as Said

        refusal.explanation_entries.append(Said(refusal.message))
