"""`orchard chat`: a conversation in the terminal.

Ctrl-C stops an answer, and what was said of it stays in the conversation; at the prompt Ctrl-C and Ctrl-D leave. A turn
that fails is taken back and the conversation goes on. Input that is no terminal is one prompt, answered as by `respond`. All
of it is one session, as `orchard.Session` has them: guardrails are on, and tools and adapters may be given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from orchard.cli import common, guided
from orchard.cli.answer import answer_once
from orchard.cli.common import note
from orchard.cli.conversation import Conversation, Setup
from orchard.cli.options import (
    AdapterOption,
    DraftOption,
    GuardrailsOption,
    JsonOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    NoGuardrailsOption,
    OfflineOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    ToolOption,
    TopKOption,
    TopPOption,
)
from orchard.core.errors import ContextOverflow, OrchardError, UsageError


def chat(
    model: ModelOption = "smollm2",
    draft: DraftOption = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    tool: ToolOption = None,
    adapter: AdapterOption = None,
    guardrails: GuardrailsOption = None,
    no_guardrails: NoGuardrailsOption = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep the conversation within this, however long it gets, such as 64MB; old parts are forgotten.",
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="FILE", help="Take up a conversation that /save wrote.")
    ] = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Talk with a model. Type /help for what else can be done."""
    common.go_offline(offline)
    ways = guided.Ways.of(None, None, None, tool, adapter, guardrails, no_guardrails)
    settings = common.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    )
    if not sys.stdin.isatty():
        _answer_input(model, draft, system, settings, ways, resume, as_json)
        return
    if as_json:
        raise UsageError("a conversation in the terminal has no JSON form", hint="use `orchard respond --json`")
    if system:
        common.unicode_text("the text of --system", system)
    if resume is not None and not Path(resume).is_file():
        raise UsageError(f"--resume: there is no file {resume}", hint="name a file that /save wrote")
    options, tools = guided.options_of(settings), guided.tools_of(ways.tools)
    loaded = common.load_model(model, draft)
    adapters = tuple(guided.adapter_of(loaded, folder) for folder in ways.adapters)
    setup = Setup(loaded, options, tools, adapters, guided.mode_of(ways.guardrails), guided.shown_calls(), memory)
    conversation = Conversation(setup, system)
    if resume is not None:
        conversation.load(Path(resume))
        if system:
            conversation.set_system(system)
    note(f"{model}. /help shows the commands, Ctrl-D leaves.")
    if conversation.session.memory is not None:
        note(str(conversation.session.memory.chosen))
    with _history():
        converse(conversation, max_tokens)


def _answer_input(
    model: str,
    draft: str | None,
    system: str | None,
    settings: dict[str, Any],
    ways: guided.Ways,
    resume: str | None,
    as_json: bool,
) -> None:
    """Input that is no terminal: one prompt."""
    if resume is not None:
        raise UsageError("--resume needs a terminal", hint="in a program: orchard.Session.resume(path)")
    asked: dict[str, Any] = {"name": model, "draft": draft, "system": system, "settings": settings, "as_json": as_json}
    text = common.read_prompt(None)
    if ways.need_a_session():
        guided.respond_in_session(text, ways=ways, **asked)
    else:
        answer_once(text, **asked)


def converse(conversation: Conversation, max_tokens: int) -> None:
    """Read, answer, repeat, until the person leaves."""
    while True:
        try:
            typed = _ask("> ")
        except (EOFError, KeyboardInterrupt):
            note()
            return
        except UnicodeDecodeError:
            note("error: that line was not UTF-8\nhint: set the terminal to UTF-8; the conversation is as it was")
            continue
        line = typed.strip()
        if not line:
            continue
        try:
            if not typed.startswith("/"):
                take_turn(conversation, line, max_tokens)
            elif not conversation.command(line):
                return
        except OrchardError as error:
            note(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        except BrokenPipeError:
            raise
        except Exception as error:  # a fault of ours must not cost the person the conversation
            note(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())}")
            note("hint: the conversation is as it was; /save FILE keeps it")


def take_turn(conversation: Conversation, text: str, max_tokens: int) -> None:
    """One question and its answer. Both stay, also when the answer was stopped; neither does when it failed."""
    heard: list[str] = []
    try:
        response = guided.written(conversation.session, text, {}, heard)
    except KeyboardInterrupt:
        note("stopped")
        keep_stopped(conversation, text, "".join(heard))
        return
    except ContextOverflow as error:
        error.hint = f"shorten the message by at least {error.tokens + 1 - error.limit:,} tokens"
        if conversation.transcript.turns():
            error.hint += ", or begin anew: /save FILE keeps this conversation, /reset forgets it"
        raise
    for failure in response.tool_errors:
        note(f"warning: {failure.message}")
    common.note_if_cut(cast(Any, response), max_tokens)  # it ends and counts like an answer of the engine


def keep_stopped(conversation: Conversation, text: str, answer: str) -> None:
    """What was said of an answer that was stopped joins the conversation: the person has read it, so the model should too."""
    from orchard.session.transcript import PromptEntry, Response

    if answer:
        conversation.transcript.extend([PromptEntry(text), Response(answer)])


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


@contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier conversations under the arrow keys, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from orchard.weights.library import home

    if "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # off in Python, where each pasted line is then a turn
    path = home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            # Only what is new is added: another conversation may have ended meanwhile.
            readline.append_history_file(readline.get_current_history_length() - known, path)
