"""`orchard respond` through a session: answers held to a form, tools of the user's own, adapters, guardrails.

A plain prompt does not come here: it needs none of this and starts faster without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli import common
from orchard.cli.named import looks_named, thing_named
from orchard.core.errors import ContextOverflow, UsageError

if TYPE_CHECKING:
    from orchard.session.hooks import Hooks
    from orchard.session.options import GenerationOptions
    from orchard.session.session import Session
    from orchard.session.streams import Response

MODES = ("default", "permissive", "strict", "off")
MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Ways:
    """What was asked for beside a plain answer, as it was written on the command line."""

    schema: str | None = None
    choices: str | None = None
    regex: str | None = None
    tools: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    guardrails: str | None = None

    @classmethod
    def of(
        cls,
        schema: str | None,
        choices: str | None,
        regex: str | None,
        tools: Sequence[str] | None,
        adapters: Sequence[str] | None,
        guardrails: str | None,
        no_guardrails: bool,
    ) -> Ways:
        if no_guardrails and guardrails not in (None, "off"):
            raise UsageError(f"--no-guardrails and --guardrails {guardrails}", hint="give one of them")
        mode = "off" if no_guardrails else guardrails
        if mode is not None and mode not in MODES:
            raise UsageError(f"no guardrails called {mode!r}", hint=f"one of {', '.join(MODES)}")
        missing = [folder for folder in adapters or () if not Path(folder).is_dir()]
        if missing:
            raise UsageError(f"--adapter: no folder {missing[0]}", hint="name a folder with adapter_config.json in it")
        given = [name for name, value in (("--schema", schema), ("--choices", choices), ("--regex", regex)) if value]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} together", hint="an answer has one form: give one of them")
        return cls(schema, choices, regex, tuple(tools or ()), tuple(adapters or ()), mode)

    def need_a_session(self) -> bool:
        return self != Ways() and self != Ways(guardrails="off")

    def form(self) -> dict[str, Any]:
        """The arguments of `Session.respond` that say what the answer must look like."""
        if self.schema is not None:
            return form_of(self.schema)
        if self.choices is not None:
            texts = [text.strip() for text in self.choices.split(",")]
            if not all(texts):
                raise UsageError(f"--choices {self.choices!r} has an empty choice", hint="write them as yes,no,maybe")
            return {"choices": texts}
        return {"regex": self.regex} if self.regex is not None else {}


def form_of(schema: str) -> dict[str, Any]:
    """The form for `--schema`: a class of the user's, or a file."""
    if looks_named(schema):
        thing = thing_named(schema, "--schema")
        return {"json_schema": thing} if isinstance(thing, dict) else {"generating": thing}
    return {"json_schema": read_json(Path(schema), "--schema")}


def checked_schema(kind: Any) -> dict[str, Any]:
    """The schema of a type (or itself) as a dict, once it is known that an answer can be held to it."""
    from orchard.generate.json_schema import normalise
    from orchard.session.schema import schema_for

    made = schema_for(kind)
    normalise(json.loads(made.constraint().source))
    return kind if isinstance(kind, dict) else made.to_dict()


def read_json(path: Path, what: str) -> Any:
    """A JSON file of the user's."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{what}: {path} is larger than {MOST_BYTES // 2**20} MiB", hint="check the path")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "name a JSON file, or a class as module:Class"
        raise UsageError(f"{what}: {path} cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what}: {path} is not JSON: {' '.join(str(error).split())[:200]}", hint="mend it") from error


def options_of(settings: dict[str, Any]) -> GenerationOptions:
    """The sampling options of the command line as a session takes them."""
    from orchard.session.options import GenerationOptions, SamplingMode

    top_k, top_p = settings.get("top_k"), settings.get("top_p")
    if top_k is not None and top_p is not None:
        raise UsageError("--top-k and --top-p together", hint="a session samples by one of them")
    mode = SamplingMode.random(top_k, top_p) if top_k is not None or top_p is not None else None
    return GenerationOptions(
        mode,
        settings.get("temperature"),
        settings.get("max_tokens"),
        seed=settings.get("seed"),
        stop=tuple(settings.get("stop") or ()),
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty"),
    )


def tools_of(names: Sequence[str]) -> list[Any]:
    """Functions and tools of the user's; a class of tools becomes a tool."""
    found = []
    for name in names:
        thing = thing_named(name, "--tool")
        found.append(thing() if isinstance(thing, type) else thing)
    return found


def session_of(model: Any, instructions: str | None, ways: Ways, tools: Sequence[Any], options: Any) -> Session:
    """A session on a loaded model, with the adapters loaded into it."""
    from orchard.session.session import Session

    names = tuple(adapter_of(model, adapter) for adapter in ways.adapters)
    return Session(
        instructions,
        model=model,
        tools=tools,
        options=options,
        adapters=names,
        guardrails=mode_of(ways.guardrails),
        hooks=shown_calls(),
    )


def shown_calls() -> Hooks | None:
    """In a terminal, a person sees which tools are called, before what they do."""
    if not sys.stderr.isatty():
        return None
    from orchard.session.hooks import Hooks

    return Hooks(on_tool_call=lambda call: common.note(f"(calls {call.name}({common.printable(call.arguments)}))"))


def mode_of(guardrails: str | None) -> str | None:
    """The mode as a session takes it: None for none, on by default."""
    return None if guardrails == "off" else guardrails or "default"


def adapter_of(model: Any, adapter: str) -> str:
    """The name under which an adapter is loaded."""
    if not hasattr(model, "adapters"):
        raise UsageError("this model takes no adapters", hint="leave out --adapter")
    return str(model.adapters.load(Path(adapter)))


def respond_in_session(
    prompt: str,
    *,
    name: str,
    draft: str | None,
    system: str | None,
    settings: dict[str, Any],
    ways: Ways,
    as_json: bool,
    experts_budget: str | None = None,
) -> None:
    """Load, answer, print. Everything that can be wrong is found before the model is loaded."""
    form, tools, options = ways.form(), tools_of(ways.tools), options_of(settings)
    if ways.schema is not None:
        checked_schema(next(iter(form.values())))
    if system:
        common.unicode_text("the text of --system", system)
    model = common.load_model(name, draft, experts_budget)
    session = session_of(model, system, ways, tools, options)
    try:
        response = session.respond(prompt, **form) if as_json else written(session, prompt, form)
    except ContextOverflow as error:
        error.hint = f"shorten the prompt by at least {error.tokens + 1 - error.limit:,} tokens"
        raise
    for failure in response.tool_errors:
        common.note(f"warning: {failure.message}")
    if as_json:
        common.print_json(facts_of(response) | {"model": name}, indent=None)
    elif response.finish == "length" and sys.stderr.isatty():
        common.note(f"(cut after {response.usage.output:,} tokens; --max-tokens N may allow more)")


def written(session: Session, prompt: str, form: dict[str, Any], heard: list[str] | None = None) -> Response:
    """Write an answer as it comes, and end its line however it ended; `heard` collects it, so that an interrupted answer
    is not lost."""
    heard = heard if heard is not None else []
    with session.stream(prompt, **form) as stream:
        try:
            for delta in stream.deltas():
                heard.append(delta)
                sys.stdout.write(common.printable(delta))
                sys.stdout.flush()
        except BaseException:
            if heard:
                print(flush=True)
            raise
        print(flush=True)
        return stream.response


def facts_of(response: Response) -> dict[str, Any]:
    """A response as JSON."""
    content = json.loads(response.raw_content.to_json()) if response.raw_content is not None else response.text
    return {
        "content": content,
        "text": response.text,
        "tool_calls": tool_calls(response.transcript_entries),
        "finish": response.finish,
        "usage": response.usage.to_dict(),
        "seed": response.seed,
    }


def tool_calls(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Every call of a turn with what came of it."""
    from orchard.session.transcript import ToolCalls, ToolOutput

    outputs = {entry.call_id: entry.text for entry in entries if isinstance(entry, ToolOutput)}
    return [
        {"name": call.name, "arguments": call.values, "output": outputs.get(call.id)}
        for entry in entries
        if isinstance(entry, ToolCalls)
        for call in entry
    ]
