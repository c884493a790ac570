"""`LanguageModelSession`: the SDK's session, on the same loop as `orchard.Session`, for asyncio.

Where the SDK is known to fall short this one does not: options count for guided calls, seeds are kept, guided answers stream as
partial objects, streams never block the event loop and take their turn in line, and errors say what happened.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from orchard.core.errors import OrchardError
from orchard.session.errors import GenerationError, ImagePromptError, InvalidGenerationSchemaError, PromptError
from orchard.session.fm.models import LanguageModel, model_of
from orchard.session.fm.worker import answer, snapshots
from orchard.session.options import ContextOptions, GenerationOptions
from orchard.session.profiles import Asked
from orchard.session.prompt import Prompt
from orchard.session.session import Session
from orchard.session.streams import Response, Snapshot, WantedError
from orchard.session.transcript import Transcript
from orchard.session.turn import Usage


class NotGenerableError(InvalidGenerationSchemaError, ValueError):
    """A type that no answer can be made from; a ValueError, as in the SDK."""

    code = "not-generable"


class SchemaFormatError(InvalidGenerationSchemaError, GenerationError, TypeError):
    """A JSON Schema that is no dict, or that JSON cannot say; caught by what the SDK raises for either."""

    code = "schema-format"


class BadPromptError(GenerationError, PromptError):
    """A prompt that no model can be given; for programs that expect a `GenerationError` here, as from the SDK."""

    code = "prompt"


class LanguageModelSession:
    """A conversation. Calls that come while it answers wait in line; other sessions run beside it."""

    def __init__(
        self,
        instructions: str | None = None,
        model: Any = None,
        tools: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        """`model`: a `SystemLanguageModel` (the default), a `LanguageModel`, or what these are made from. `settings`: what
        `orchard.Session` takes beside these (options, guardrails, policy, hooks, profile, …)."""
        self.model: LanguageModel = model_of(model)
        given = {
            "guardrails": self.model.guardrails,
            "adapters": self.model.adapters,
            "use_case": self.model.use_case,
        }
        self.session = Session(instructions or None, model=self.model.ref, tools=tools or (), **{**given, **settings})
        """The same conversation for code that is not asynchronous."""

    @classmethod
    def from_transcript(
        cls, transcript: Transcript, model: Any = None, tools: Sequence[Any] | None = None, **settings: Any
    ) -> LanguageModelSession:
        """A session that goes on from a transcript, and keeps that very object. Tools that the transcript names are history: give
        those that may be called."""
        return cls(None, model, tools, transcript=transcript, **settings)

    # Asking

    async def respond(
        self,
        prompt: Prompt,
        generating: Any = None,
        *,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        options: GenerationOptions | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Any:
        """A text; with `generating` an instance of that type; with `schema` or `json_schema` a `GeneratedContent`."""
        response = await self.response(
            prompt,
            generating,
            schema=schema,
            json_schema=json_schema,
            options=options,
            regex=regex,
            choices=choices,
            context_options=context_options,
            tools=tools,
            adapters=adapters,
        )
        return self._content(response.content, (generating, schema, json_schema))

    async def response(
        self,
        prompt: Prompt,
        generating: Any = None,
        *,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        options: GenerationOptions | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Response:
        """The same with everything about it: usage, log-probabilities, transcript entries, failed tool calls, the seed."""
        wanted = _wanted(generating, schema, json_schema, regex, choices)
        return await answer(self.session, self._asked(prompt, wanted, options, context_options, tools, adapters))

    async def stream_response(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        generating: Any = None,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The text so far, again and again; for a guided call the partial object so far, its fields in declaration order."""
        wanted = _wanted(generating, schema, json_schema, regex, choices)
        asked = self._asked(prompt, wanted, options, context_options, tools, adapters)
        stream = snapshots(self.session, asked)
        shown: Any = None
        try:
            async for item in stream:
                if not isinstance(item, Snapshot):
                    break
                if item.delta or (shown is None and item.text):
                    shown = item.content if asked.wanted.schema is not None else item.text
                    if shown is not None:
                        yield shown
        finally:
            await stream.aclose()

    async def stream_snapshots(
        self, prompt: Prompt, generating: Any = None, *, options: GenerationOptions | None = None, **more: Any
    ) -> AsyncGenerator[Snapshot, None]:
        """Snapshots with everything: content, raw content, what is new, and usage in the last one. `more`: as `respond`."""
        form = ("schema", "json_schema", "regex", "choices")
        wanted = _wanted(generating, *(more.pop(name, None) for name in form))
        asked = self._asked(prompt, wanted, options, **more)
        stream = snapshots(self.session, asked)
        try:
            async for item in stream:
                if isinstance(item, Snapshot):
                    yield item
        finally:
            await stream.aclose()

    def prewarm(self, prompt_prefix: str | None = None) -> None:
        """Get ready in the background: load the model, read the instructions and how the next prompt will begin."""

        def work(session: Session) -> None:
            with suppress(OrchardError):  # a hint: what is wrong shows when somebody asks
                session.prewarm(prompt_prefix)

        threading.Thread(target=work, args=(self.session,), name="orchard prewarm", daemon=True).start()

    # What is known

    @property
    def is_responding(self) -> bool:
        return self.session.is_responding

    @property
    def transcript(self) -> Transcript:
        return self.session.transcript

    @transcript.setter
    def transcript(self, value: Transcript) -> None:
        self.session.transcript = value

    @property
    def usage(self) -> Usage:
        """Tokens of all turns so far."""
        return self.session.usage

    def log_feedback_attachment(self, sentiment: Any = None, issues: Any = (), desired_output: Any = None) -> bytes:
        """A report about the answers so far, as JSON, to keep or to send; nothing is sent from here."""
        return self.session.feedback(sentiment, issues, desired_output)

    def save(self, path: str | Path) -> None:
        self.session.save(path)

    def close(self) -> None:
        """Stop what is being answered; the session answers no more."""
        self.session.close()

    async def __aenter__(self) -> LanguageModelSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.session).replace("<Session", "<LanguageModelSession", 1)

    def _repr_html_(self) -> str:
        return self.session._repr_html_()

    def _asked(
        self,
        prompt: Prompt,
        wanted: tuple[Any, ...],
        options: GenerationOptions | None,
        context_options: ContextOptions | None = None,
        tools: Sequence[Any] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Asked:
        _must_be_json(wanted[2])
        try:
            return self.session.asked(prompt, wanted, options, context_options, tools, adapters)
        except ImagePromptError:
            raise
        except PromptError as error:
            raise BadPromptError(str(error), hint=error.hint) from error
        except InvalidGenerationSchemaError as error:
            if wanted[0] is None or hasattr(wanted[0], "generation_schema"):
                raise
            raise NotGenerableError(str(error), hint=error.hint) from error

    def _content(self, content: Any, wanted: tuple[Any, ...]) -> Any:
        """Where nothing was asked for but the use case has a form of its own, a text: the SDK's callers expect one."""
        if isinstance(content, str) or any(form is not None for form in wanted):
            return content
        tags = getattr(content, "tags", None)
        return ", ".join(tags) if isinstance(tags, list) else str(content)


def _must_be_json(schema: Any) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping):
        wrong = f"json_schema has the wrong format: it is a {type(schema).__name__}"
        raise SchemaFormatError(wrong, hint="give a dict; json.loads makes one of a text")
    try:
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        hint = "use dicts, lists, texts and numbers"
        raise SchemaFormatError(f"json_schema is not serializable to JSON: {error}", hint=hint) from error


def _wanted(generating: Any, schema: Any, json_schema: Any, regex: Any, choices: Any) -> tuple[Any, ...]:
    """As in the SDK: a type and a schema together are refused; of a type, a schema and a JSON Schema the first counts."""
    if generating is not None and schema is not None:
        raise WantedError("generating and schema were given together", hint="an answer has one form: give one of them")
    if generating is not None:
        schema = json_schema = None
    if schema is not None:
        json_schema = None
    return generating, schema, json_schema, regex, choices
