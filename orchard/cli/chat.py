"""`orchard chat`: a conversation in the terminal.

Ctrl-C stops an answer, and what was said of it stays in the conversation; at the prompt Ctrl-C and Ctrl-D leave. A turn
that fails is taken back and the conversation goes on. Input that is no terminal is one prompt, answered as by `respond`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from orchard.cli import common
from orchard.cli.answer import answer_once, write_stream
from orchard.cli.common import note
from orchard.cli.conversation import Conversation
from orchard.cli.options import (
    JsonOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    OfflineOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from orchard.core.errors import ContextOverflow, OrchardError, UsageError

if TYPE_CHECKING:
    from orchard.session.model import Model


def chat(
    model: ModelOption = "smollm2",
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Talk with a model. Type /help for what else can be done."""
    common.go_offline(offline)
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
        answer_once(common.read_prompt(None), name=model, system=system, settings=settings, as_json=as_json)
        return
    if as_json:
        raise UsageError("a conversation in the terminal has no JSON form", hint="use `orchard respond --json`")
    if system:
        common.unicode_text("the text of --system", system)
    loaded = common.load_model(model)
    note(f"{model}. /help shows the commands, Ctrl-D leaves.")
    with _history():
        converse(Conversation(system), loaded, settings)


def converse(conversation: Conversation, model: Model, settings: dict[str, Any]) -> None:
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
                take_turn(conversation, model, line, settings)
            elif not conversation.command(line):
                return
        except OrchardError as error:
            note(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        except BrokenPipeError:
            raise
        except Exception as error:  # a fault of ours must not cost the person the conversation
            note(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())}")
            note("hint: the conversation is as it was; /save FILE keeps it")


def take_turn(conversation: Conversation, model: Model, text: str, settings: dict[str, Any]) -> None:
    """One question and its answer. Both stay, also when the answer was stopped; neither does when it failed."""
    asked = [*conversation.messages, {"role": "user", "content": text}]
    heard: list[str] = []
    try:
        common.note_if_cut(write_stream(model, asked, settings, heard), settings["max_tokens"])
    except KeyboardInterrupt:
        note("stopped")
    except ContextOverflow as error:
        error.hint = f"shorten the message by at least {error.tokens + 1 - error.limit:,} tokens"
        if conversation.messages:
            error.hint += ", or begin anew: /save FILE keeps this conversation, /reset forgets it"
        raise
    answer = "".join(heard)
    if answer:
        conversation.messages = [*asked, {"role": "assistant", "content": answer}]


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
