"""A conversation: its messages, the commands that change them, and the file that keeps them.

The file is JSON, `{"messages": [{"role": "user", "content": "…"}, …]}`. It is data from outside like any other: what is not
a conversation is refused whole, and a file that is not one is never written over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchard.cli.common import note
from orchard.core.errors import BadFile, UsageError

HELP = """\
/system TEXT   set the instructions the model gets first (no TEXT: remove them)
/reset         forget the conversation, keep the instructions
/save FILE     write the conversation as JSON
/load FILE     take up a saved conversation
/exit          leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while the model answers stops the answer. Arrow keys bring earlier lines
back. Lines pasted together are one message."""
ROLES = ("system", "user", "assistant")
MOST_BYTES = 64 * 2**20
FORM = 'a conversation is {"messages": [{"role": "user", "content": "…"}, …]}'


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
        """Write the messages; over an earlier conversation, but over nothing else."""
        from orchard.core.files import write_text

        if path.exists():
            try:
                read_messages(path)
            except BadFile as error:
                hint = "choose another name; nothing was written"
                raise BadFile(f"{path} is there already, and is no saved conversation", hint=hint) from error
        try:
            write_text(path, json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise BadFile(f"{path} cannot be written: {error.strerror}", hint="choose another file") from error

    def load(self, path: Path) -> None:
        """Take the messages of a file; the ones here stay as they are when it is not a conversation."""
        self.messages = read_messages(path)

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
            self.save(_path(rest))
            note(f"saved {len(self.messages)} messages to {rest}")
        elif name == "/load":
            self.load(_path(rest))
            note(f"loaded {len(self.messages)} messages from {rest}")
        else:
            note(f"error: there is no command {name}")
            note("hint: /help shows them; with a space in front the line is sent as a message")
        return True


def read_messages(path: Path) -> list[dict[str, str]]:
    """The messages in a file, checked one by one."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(f"{path} is not a file", hint="check the path")
        if path.stat().st_size > MOST_BYTES:
            raise BadFile(f"{path} is larger than {MOST_BYTES // 2**20} MiB", hint=FORM)
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not JSON", hint=FORM) from error
    found = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(found, list):
        raise BadFile(f"{path} holds no messages", hint=FORM)
    for number, message in enumerate(found, start=1):
        if not _is_message(message):
            raise BadFile(f"message {number} of {path} has no role or no text", hint=FORM)
    return [{"role": message["role"], "content": message["content"]} for message in found]


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
