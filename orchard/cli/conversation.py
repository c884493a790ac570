"""A conversation in the terminal: a session, the commands that change it, and the files that keep it.

`/save` writes a session as `orchard.Session.save` does. `/load` also takes a transcript of Apple's framework, and a plain list of
messages. A file is data from outside like any other: what is no conversation is refused whole, and a file that is not one is
never written over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli.common import note
from orchard.core.errors import BadFile, UsageError

if TYPE_CHECKING:
    from orchard.session.session import Session
    from orchard.session.transcript import Entry, Transcript

HELP = """\
/system TEXT   set the instructions the model gets first (no TEXT: remove them)
/tools         list the tools that the model may call
/usage         show how many tokens were read and written, and what fits
/undo          take back the last question and its answer
/reset         forget the conversation, keep the instructions
/save FILE     write the conversation to a file
/load FILE     take up a saved conversation
/exit          leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while the model answers stops the answer. Arrow keys bring earlier lines
back. Lines pasted together are one message."""
ROLES = ("system", "user", "assistant")
MOST_BYTES = 64 * 2**20
FORM = 'give a file that /save wrote, a transcript, or {"messages": [{"role": "user", "content": "…"}, …]}'


@dataclass(frozen=True)
class Setup:
    """What every session of this run of the program is made with."""

    model: Any
    options: Any = None
    tools: Sequence[Any] = ()
    adapters: tuple[str, ...] = ()
    guardrails: Any = "default"
    hooks: Any = None
    memory: str | None = None

    def session(self, instructions: str | None = None, transcript: Transcript | None = None) -> Session:
        from orchard.session.session import Session

        return Session(instructions, transcript=transcript, model=self.model, **self._rest())

    def resume(self, path: Path) -> Session:
        """The session of a file, in whichever of the forms."""
        from orchard.session.session import Session
        from orchard.session.transcript import Transcript

        document = read_document(path)
        if kind_of(document) == "session":
            return Session.resume(path, model=self.model, **self._rest())
        if kind_of(document) == "transcript":
            return self.session(transcript=Transcript.from_json_dict(document))
        return self.session(transcript=Transcript(entries_of(read_messages(document, path))))

    def _rest(self) -> dict[str, Any]:
        given = {} if self.memory is None else {"memory": self.memory}
        return {
            **given,
            "options": self.options,
            "tools": self.tools,
            "adapters": self.adapters,
            "guardrails": self.guardrails,
            "hooks": self.hooks,
        }


class Conversation:
    """A session, and the commands that change it."""

    def __init__(self, setup: Setup, instructions: str | None = None) -> None:
        self.setup = setup
        self.session = setup.session(instructions)

    @property
    def transcript(self) -> Transcript:
        return self.session.transcript

    def set_system(self, text: str) -> None:
        from orchard.session.transcript import Instructions, Transcript

        tools = next(
            (entry.tools for entry in self.transcript if isinstance(entry, Instructions) and entry.tools), None
        )
        first = [Instructions(text or (), tools)] if text or tools else []
        self.session.transcript = Transcript([*first, *self.transcript.history])

    def reset(self) -> None:
        from orchard.session.transcript import Instructions, Transcript

        self.session.transcript = Transcript(entry for entry in self.transcript if isinstance(entry, Instructions))

    def undo(self) -> str | None:
        """Take back the last turn; its question, or None where there is none."""
        from orchard.session.transcript import Transcript

        turns = self.transcript.turns()
        if not turns:
            return None
        gone = {entry.id for entry in turns[-1]}
        self.session.transcript = Transcript(entry for entry in self.transcript if entry.id not in gone)
        return turns[-1][0].text

    def save(self, path: Path) -> None:
        """Write the session; over an earlier conversation, but over nothing else."""
        if path.exists():
            try:
                document = read_document(path)
                if kind_of(document) == "messages":
                    read_messages(document, path)
            except BadFile as error:
                hint = "choose another name; nothing was written"
                raise BadFile(f"{path} is there already, and is no saved conversation", hint=hint) from error
        try:
            # Without what the model has read: that is far larger than the text, and read again in a moment.
            self.session.save(path, cache=False)
        except OSError as error:
            raise BadFile(f"{path} cannot be written: {error.strerror}", hint="choose another file") from error

    def load(self, path: Path) -> None:
        """Take up the conversation of a file; this one stays as it is when it is none."""
        self.session = self.setup.resume(path)

    def command(self, line: str) -> bool:
        """Carry out a /command; False when it asks to leave."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        if name in ("/help", "/tools", "/usage", "/undo", "/reset"):
            self._plain(name)
        elif name == "/system":
            self.set_system(rest)
            note("instructions set" if rest else "instructions removed")
        elif name in ("/save", "/load") and not rest:
            note(f"error: {name} needs a file name")
        elif name == "/save":
            self.save(_path(rest))
            note(f"saved {len(self.transcript.turns())} turns to {rest}")
        elif name == "/load":
            self.load(_path(rest))
            note(f"loaded {len(self.transcript.turns())} turns from {rest}")
        else:
            note(f"error: there is no command {name}")
            note("hint: /help shows them; with a space in front the line is sent as a message")
        return True

    def _plain(self, name: str) -> None:
        """Commands that take nothing."""
        if name == "/help":
            note(HELP)
        elif name == "/reset":
            self.reset()
            note("forgotten")
        elif name == "/undo":
            taken = self.undo()
            note("there is nothing to take back" if taken is None else f"taken back: {_short(taken)}")
        elif name == "/tools":
            specs = self.session.tools.specs()
            lines = [f"{spec.name}: {_short(spec.description)}" if spec.description else spec.name for spec in specs]
            note("\n".join(lines) or "no tools; `orchard chat --tool module:function` gives the model one")
        else:
            used, held = self.session.usage, self.session.token_count()
            note(f"read {used.input:,} tokens ({used.cached:,} of them found in the cache), wrote {used.output:,}")
            note(f"the conversation takes {held:,} of {self.session.context_size:,} tokens")


def read_document(path: Path) -> Any:
    """The JSON of a file that may be a conversation."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(f"{path} is not a file", hint="check the path")
        if path.stat().st_size > MOST_BYTES:
            raise BadFile(f"{path} is larger than {MOST_BYTES // 2**20} MiB", hint=FORM)
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not JSON", hint=FORM) from error
    if kind_of(document) is None:
        raise BadFile(f"{path} holds no messages", hint=FORM)
    return document


def kind_of(document: Any) -> str | None:
    """Which form of a conversation a document has; None where it has none."""
    if isinstance(document, list):
        return "messages"
    if not isinstance(document, dict):
        return None
    kinds = {"Orchard.Session": "session", "FoundationModels.Transcript": "transcript"}
    named = document.get("type")
    if isinstance(named, str) and named in kinds:
        return kinds[named]
    return "messages" if isinstance(document.get("messages"), list) else None


def read_messages(document: Any, path: Path) -> list[dict[str, str]]:
    """Plain messages, checked one by one."""
    found: list[Any] = document["messages"] if isinstance(document, dict) else document
    for number, message in enumerate(found, start=1):
        if not _is_message(message):
            raise BadFile(f"message {number} of {path} has no role or no text", hint=FORM)
    return [{"role": message["role"], "content": message["content"]} for message in found]


def entries_of(messages: Sequence[dict[str, str]]) -> list[Entry]:
    from orchard.session.transcript import Instructions, PromptEntry, Response

    kinds: dict[str, Any] = {"system": Instructions, "user": PromptEntry, "assistant": Response}
    return [kinds[message["role"]](message["content"]) for message in messages]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
        return False
    try:
        message["content"].encode()
    except UnicodeEncodeError:  # half a surrogate pair: no text, and nothing that could be saved again
        return False
    return True


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text} names nobody's home folder", hint="write the path out") from error


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60]} …"
