"""A conversation with a model: ask, stream, call tools, get typed answers, save it and go on another day.

with orchard.Session("You are a helpful assistant.") as session:
    print(session.respond("What is the capital of France?").text)
    for snapshot in session.stream("Tell me about it."):
        print(snapshot.delta, end="")

A session answers one prompt at a time; whoever asks meanwhile waits in line. A turn that failed or was cancelled leaves the
transcript as it was. Everything here is synchronous; `orchard.fm` is the same for asyncio.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from orchard.core.errors import UsageError
from orchard.session.assets import DEFAULT_MODEL, ModelRef, remembered, tokens_of
from orchard.session.errors import ConcurrentRequestsError, TranscriptError
from orchard.session.hooks import HookChain, Hooks
from orchard.session.options import ContextOptions, GenerationOptions
from orchard.session.profiles import (
    Asked,
    Moment,
    Profile,
    Profiles,
    checked,
    guardrails_of,
    pick,
    setup_of,
    told,
    toolbox,
    use_case_profile,
)
from orchard.session.prompt import Prompt, compose
from orchard.session.respond import ANSWERING, Reply
from orchard.session.resume import first_transcript, resume_session, save_session
from orchard.session.streams import Line, Place, Response, ResponseStream, Snapshot, Wanted
from orchard.session.transcript import Entry, Instructions, Transcript
from orchard.session.turn import Executor, Usage

if TYPE_CHECKING:
    from orchard.session.memory import Remembering
    from orchard.session.tools import ToolBox


class Session:
    """A conversation. See the module for how to use one, and `orchard.session` for the parts that it takes."""

    def __init__(
        self,
        instructions: str | None = None,
        *,
        model: Any = DEFAULT_MODEL,
        tools: Sequence[Any] = (),
        options: GenerationOptions | None = None,
        context_options: ContextOptions | None = None,
        guardrails: Any = "default",
        policy: Any = None,
        adapters: Sequence[str] = (),
        hooks: Hooks | Mapping[str, Any] | None = None,
        profile: Profiles | None = None,
        use_case: str = "general",
        transcript: Transcript | Iterable[Entry] | None = None,
        max_steps: int = 8,
        at_limit: Literal["error", "answer"] = "error",
        required_steps: int | None = 1,
        tool_timeout: float | None = 60.0,
        parallel_tools: bool = True,
        transcript_error_policy: Literal["revert", "preserve"] = "revert",
        properties: Mapping[str, Any] | None = None,
        memory: Any = None,
    ) -> None:
        """`model`: a name, a path, an `orchard.Model` or an executor. `tools`: functions and `Tool`s. `policy`: what to leave out
        when the conversation outgrows the context (None: raise). `guardrails`: a mode, a `Guardrails`, or None for none.
        `max_steps`: how often in one turn the model may call tools; `at_limit`: what then. `required_steps`: with tools
        required, how many steps must call one (None: all). With a `transcript` the conversation goes on from there. `memory`:
        bytes ("64MB", or a `Memory`) that keys and values stay within, however long it gets; `session.memory` says more.
        """
        if instructions is not None and not isinstance(instructions, str):
            raise UsageError(f"instructions are {type(instructions).__name__}", hint="give them as text")
        _one_of("at_limit", at_limit, ("error", "answer"))
        _one_of("transcript_error_policy", transcript_error_policy, ("revert", "preserve"))
        self.options = options
        self.context_options = context_options
        self.hooks = Hooks.of(hooks)
        self.profile = checked(profile) if profile is not None else use_case_profile(use_case)
        self.policy = policy
        self.adapters = _names(adapters)
        self.max_steps = max_steps
        self.at_limit = at_limit
        self.required_steps = required_steps
        self.tool_timeout = tool_timeout
        self.parallel_tools = parallel_tools
        self.transcript_error_policy = transcript_error_policy
        self.properties: dict[str, Any] = dict(properties or {})
        """Anything the application wants to keep with the session; profiles see it."""
        self.guardrails = guardrails_of(guardrails)
        self._tools = toolbox(tools)
        self._ref = model if isinstance(model, ModelRef) else ModelRef(model)
        if not isinstance(model, ModelRef):
            self._ref.executor()  # a name that is wrong is known now
        self._profile_refs: dict[int, ModelRef] = {}
        self._memory = remembered(memory, self._ref)
        self._transcript = first_transcript(transcript, instructions, self._tools)
        self._view: tuple[tuple[Entry, ...], tuple[Entry, ...]] = ((), ())
        self._usage = Usage()
        self._active: Profile | None = None
        self.key = object()
        """Stands for this session where the session itself would be kept alive."""
        self._line = Line()
        self._closed = False

    # Asking

    def respond(
        self,
        prompt: Prompt,
        generating: Any = None,
        *,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        options: GenerationOptions | None = None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Response:
        """Answer a prompt: in text, as an instance of a type (`generating`), as JSON of a schema, as text that matches a regular
        expression, or as one of some choices. `tools` and `adapters` count for this call instead of the session's."""
        wanted = (generating, schema, json_schema, regex, choices)
        asked = self.asked(prompt, wanted, options, context_options, tools, adapters, metadata)
        return finished(self.converse(asked))

    def stream(
        self,
        prompt: Prompt,
        generating: Any = None,
        *,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        options: GenerationOptions | None = None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ResponseStream:
        """The same, as it comes: snapshots with the text or the partial object so far, and what is new. The session is busy from
        the first snapshot until the stream ends or is closed."""
        wanted = (generating, schema, json_schema, regex, choices)
        asked = self.asked(prompt, wanted, options, context_options, tools, adapters, metadata)
        return ResponseStream(self.converse(asked))

    def asked(
        self,
        prompt: Prompt,
        wanted: tuple[Any, ...],
        options: GenerationOptions | None = None,
        context: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        run_async: Any = None,
    ) -> Asked:
        """A call, checked: what is wrong with it raises here."""
        self._must_be_open()
        if options is not None and not isinstance(options, GenerationOptions):
            raise UsageError(f"options are {type(options).__name__}", hint="give a GenerationOptions")
        text = compose(prompt).text
        names = None if adapters is None else _names(adapters)
        return Asked(text, Wanted.of(*wanted), options, context, tools, names, dict(metadata or {}), run_async)

    def converse(self, asked: Asked, place: Place | None = None) -> Generator[Snapshot, None, Response]:
        """One turn, from waiting in line to the transcript. `place`: taken already."""
        place = place or self.wait_in_line(threading.get_ident())
        try:
            place.wait()
            self._must_be_open()
            with self._transcript.busy() as record:
                reply = self._reply(asked, place)
                before = reply.history[:]
                try:
                    response = yield from reply.run()
                except BaseException:
                    if self.transcript_error_policy == "preserve":
                        record(*reply.so_far())
                    raise
                finally:
                    self._usage = self._usage + reply.usage
                if reply.history != before:
                    self._view = (self._transcript.entries, tuple(reply.history))
                record(*response.transcript_entries)
            return response
        finally:
            place.leave()

    def wait_in_line(self, thread: int | None = None) -> Place:
        """A place in the line of those who ask. A tool that asks the session which waits for it is refused."""
        if self.key in ANSWERING.get():
            raise ConcurrentRequestsError(
                "a tool asked the session that is waiting for it",
                hint="let tools use a session of their own; models are shared between sessions",
            )
        return self._line.take(thread=thread)

    def cancel(self) -> bool:
        """Stop the answer that is on its way, from another thread; whether there was one."""
        return self._line.cancel_first()

    @property
    def is_responding(self) -> bool:
        return self._line.busy

    # Getting ready, measuring

    def prewarm(self, prompt_prefix: str | None = None) -> None:
        """Load the model and read what is known of the next prompt: the conversation so far, and how the prompt will begin."""
        self._must_be_open()
        entries = list(self._transcript)
        messages = Transcript(entries).messages()
        if prompt_prefix:
            from orchard.text.messages import Message

            messages.append(Message("user", prompt_prefix))
        executor = self.executor
        if messages:
            executor.prewarm(messages, self._tools.specs())

    def token_count(self, value: Any = None, *, instructions: str | None = None) -> int:
        """Tokens of a prompt, a schema, a transcript, tools or instructions; of nothing given: of the session so far."""
        self._must_be_open()
        if value is None and instructions is None:
            messages = self._transcript.messages()
            return self.executor.count(messages, self._tools.specs(), answer=False) if messages else 0
        return tokens_of(self.executor, value, instructions)

    @property
    def usage(self) -> Usage:
        """Tokens of all turns of this session, also of those that failed."""
        return self._usage

    # What is known

    @property
    def executor(self) -> Executor:
        """What answers; loads the model where it was not needed before."""
        return self._ref.executor() if self._memory is None else self._memory.executor()

    @property
    def memory(self) -> Remembering | None:
        """How the conversation is kept within its memory: what was chosen, and what is in use; None where nothing was asked."""
        return None if self._memory is None else self._memory.remembering()

    @memory.setter
    def memory(self, value: Any) -> None:
        raise UsageError(
            "the memory of a session is chosen when it begins",
            hint="go on in another one: Session(transcript=session.transcript, memory=…)",
        )

    @property
    def context_size(self) -> int:
        return self.executor.context_size

    @property
    def tools(self) -> ToolBox:
        return self._tools

    @property
    def active_profile(self) -> Profile | None:
        """The profile of the last turn."""
        return self._active

    @property
    def transcript(self) -> Transcript:
        """What was said. It may be edited between turns."""
        return self._transcript

    @transcript.setter
    def transcript(self, value: Transcript | Iterable[Entry]) -> None:
        if self._line.busy or self._transcript.locked:
            raise TranscriptError(
                "the transcript was replaced while an answer is on its way", hint="wait for the answer, or cancel it"
            )
        self._transcript = value if isinstance(value, Transcript) else Transcript(value)
        self._view = ((), ())

    def feedback(self, sentiment: Any = None, issues: Any = (), desired_output: Any = None, **more: Any) -> bytes:
        """A report about the last answers as JSON, for the application to keep or send: the transcript and what was right or
        wrong. Nothing is sent anywhere."""
        from orchard.session.feedback import feedback_attachment

        return feedback_attachment(self._transcript, sentiment, issues, desired_output, **more)

    # Keeping it

    @property
    def view(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """The first entries of the transcript, and what the context policy left of them; both empty where it left them all."""
        return self._view

    def continue_from(self, usage: Usage, view: tuple[tuple[Entry, ...], tuple[Entry, ...]]) -> None:
        """Take over what another session had, as `resume` does."""
        self._usage, self._view = usage, view

    def save(self, path: str | Path, *, cache: bool = True) -> None:
        """Write the session to a file, whole or not at all. `cache`: and beside it what the model has read, so that the first
        answer of a resumed session comes as quickly as the next one here."""
        save_session(self, Path(path), cache=cache)

    @classmethod
    def resume(cls, path: str | Path, *, model: Any = None, **settings: Any) -> Session:
        """A session that goes on where a saved one stopped. The model is the saved one's unless another is given. Functions are
        not in the file: tools, hooks, policy and profile are given again, as to `Session`."""
        return resume_session(cls, Path(path), model, settings)

    def close(self) -> None:
        """Stop the answer that is on its way and let go of the model. A closed session answers no more."""
        self._closed = True
        self._line.cancel_first()
        self._profile_refs = {}
        self._ref = ModelRef(self._ref.name)  # a name alone keeps nothing loaded
        self._memory = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "answering" if self._line.busy else "ready"
        return f"<Session with {self._ref.name!r}: {len(self._transcript)} entries, {state}>"

    def _repr_html_(self) -> str:
        import html

        usage = self._usage
        spent = f"{usage.input} tokens read ({usage.cached} cached), {usage.output} written"
        return f"<div><b>{html.escape(repr(self))}</b> {spent}{self._transcript._repr_html_()}</div>"

    # One turn

    def _must_be_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", hint="make a new one; its transcript can be given to it")

    def _reply(self, asked: Asked, place: Place) -> Reply:
        moment = Moment(asked.prompt, self._transcript.copy(), self._active, self.properties)
        profile = pick(self.profile, moment)
        hooks = HookChain(self.hooks, Hooks.of(profile.hooks if profile is not None else None))
        self._switch(profile, hooks)
        history = self._history(told(profile, moment, self._transcript.instructions or ""))
        wanted = asked.wanted
        if profile is not None and profile.generating is not None and wanted == Wanted():
            wanted = Wanted.of(profile.generating)
        executor = self._profile_executor(profile)
        setup = setup_of(asked, profile, self, executor, hooks)
        return Reply(setup, history, asked.prompt, wanted, place.cancelled)

    def _profile_executor(self, profile: Profile | None) -> Executor:
        if profile is None or profile.model is None:
            return self.executor
        ref = self._profile_refs.setdefault(id(profile.model), ModelRef(profile.model))
        return ref.executor()

    def _switch(self, profile: Profile | None, hooks: HookChain) -> None:
        if profile is self._active:
            return
        if self._active is not None:
            HookChain(self.hooks, Hooks.of(self._active.hooks)).deactivate(self._active)
        self._active = profile
        if profile is not None:
            hooks.activate(profile)

    def _history(self, instructions: str) -> list[Entry]:
        """What was said before this turn: as the policy left it last time where the transcript still begins so, under the
        instructions that are in force."""
        entries = self._transcript.entries
        covered, view = self._view
        if covered and entries[: len(covered)] == covered:
            entries = view + entries[len(covered) :]
        if instructions != (self._transcript.instructions or ""):
            rest: list[Entry] = [entry for entry in entries if not isinstance(entry, Instructions)]
            return [Instructions(instructions), *rest] if instructions else rest
        return list(entries)


def finished(turn: Generator[Snapshot, None, Response]) -> Response:
    """Run a turn to its end."""
    while True:
        try:
            next(turn)
        except StopIteration as end:
            response: Response = end.value
            return response


def _names(names: Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}", hint="one of " + ", ".join(allowed))
