"""`orchard chat`: a conversation in the terminal.

Ctrl-C stops an answer, and what was said of it stays in the conversation; at the prompt Ctrl-C and Ctrl-D leave. A turn
that fails is taken back and the conversation goes on. Input that is no terminal is one prompt, answered as by `respond`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli import common
from orchard.cli.common import (
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
    note,
)
from orchard.cli.respond import answer_once, write_stream
from orchard.core.errors import BadFile, OrchardError, UsageError

if TYPE_CHECKING:
    from orchard.session.model import Model

HELP = """\
/system TEXT   set the instructions the model gets first (no TEXT: remove them)
/reset         forget the conversation, keep the instructions
/save FILE     write the conversation as JSON
/load FILE     take up a saved conversation
/exit          leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while the model answers stops the answer."""
ROLES = ("system", "user", "assistant")


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
    loaded = common.load_model(model)
    note(f"{model}. /help shows the commands, Ctrl-D leaves.")
    with _history():
        converse(Conversation(system), loaded, settings)


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.set_system(system or "")

    def set_system(self, text: str) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def reset(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: Path) -> None:
        from orchard.core.files import write_text

        try:
            write_text(path, json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise BadFile(f"{path} cannot be written: {error.strerror}", hint="choose another file") from error

    def load(self, path: Path) -> None:
        """Take the messages of a file; the ones here stay as they are when it is not a conversation."""
        hint = 'a conversation is {"messages": [{"role": "user", "content": "…"}, …]}'
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadFile(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
        except (ValueError, RecursionError) as error:
            raise BadFile(f"{path} is not JSON", hint=hint) from error
        found = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(found, list):
            raise BadFile(f"{path} holds no messages", hint=hint)
        for number, message in enumerate(found, start=1):
            fields = message if isinstance(message, dict) else {}
            if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
                raise BadFile(f"message {number} of {path} has no role or no text", hint=hint)
        self.messages = [{"role": message["role"], "content": message["content"]} for message in found]

    def command(self, line: str) -> bool:
        """Carry out a /command; False when it asks to leave."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            note(HELP)
        elif name == "/reset":
            self.reset()
            note("forgotten")
        elif name == "/system":
            self.set_system(rest)
            note("instructions set" if rest else "instructions removed")
        elif name in ("/save", "/load") and not rest:
            note(f"error: {name} needs a file name")
        elif name == "/save":
            self.save(Path(rest).expanduser())
            note(f"saved {len(self.messages)} messages to {rest}")
        elif name == "/load":
            self.load(Path(rest).expanduser())
            note(f"loaded {len(self.messages)} messages from {rest}")
        else:
            note(f"error: there is no command {name}; /help shows them")
        return True


def converse(conversation: Conversation, model: Model, settings: dict[str, Any]) -> None:
    """Read, answer, repeat, until the person leaves."""
    while True:
        try:
            line = _ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            note()
            return
        if not line:
            continue
        try:
            if not line.startswith("/"):
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
        write_stream(model, asked, settings, heard)
    except KeyboardInterrupt:
        note("stopped")
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

    path = home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
