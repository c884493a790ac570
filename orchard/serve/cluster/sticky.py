"""Where a request goes: to the replica that has read its beginning before, unless that one is busier than its share.

**The key.** A prefix cache helps where two prompts begin alike, and all turns of a conversation begin like its first one. So
the key is made of what the first turn already has: the model, the names of the tools, the system text, and the messages up to
and with the first of the user, of each the first `CHARACTERS` characters. For raw prompts it is the first `CHARACTERS`
characters, or the first `TOKENS` token ids. Whatever has no prompt (embeddings, lists of models) and whatever cannot be read
has no key.

**The choice.** Each key puts the replicas in an order of its own (rendezvous hashing: Thaler and Ravishankar, 1998), so one
that is lost moves only its own keys. The first in order takes the request while it holds fewer than `EASY` requests or no
more than `SHARE` times the mean (the bound of Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads",
2016); past that the least loaded takes it, and reads the beginning into its own cache too. A prefix that everybody uses is
thus spread over as many replicas as it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

CHARACTERS = 512
TOKENS = 128
MESSAGES = 8
TOOLS = 128
EASY = 4
SHARE = 1.25

_CONVERSATIONS = ("/chat/completions", "/responses", "/messages")


def sticky_key(path: str, body: bytes) -> str | None:
    """The key of a request, or None where any replica is as good as another."""
    path = path.rstrip("/")
    conversation = path.endswith(_CONVERSATIONS)
    if not conversation and not path.endswith("/completions"):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None  # the replica says what is wrong with it
    if not isinstance(fields, dict):
        return None
    beginning = _opening(fields) if conversation else _raw(fields.get("prompt"))
    if not beginning:
        return None
    described = [_short(fields.get("model")), _tool_names(fields.get("tools")), beginning]
    text = json.dumps(described, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _opening(fields: Mapping[str, Any]) -> list[str]:
    """What a conversation begins with, however the protocol calls it."""
    parts = [_text(fields[name]) for name in ("system", "instructions") if fields.get(name)]
    messages = fields.get("messages", fields.get("input"))
    if isinstance(messages, str):
        return [*parts, "user", messages[:CHARACTERS]]
    for message in islice(messages, MESSAGES) if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            break
        role = _short(message.get("role"))
        parts += [role, _text(message.get("content"))]
        if role == "user":
            break
    return parts


def _raw(prompt: Any) -> list[str]:
    """The beginning of a raw prompt; of several, the first one's."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [prompt[:CHARACTERS]] if prompt else []
    if isinstance(prompt, list):
        return [str(token) for token in prompt[:TOKENS] if isinstance(token, int)]
    return []


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content[:CHARACTERS]
    parts = islice(content, MESSAGES) if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text[:CHARACTERS] for text in texts if isinstance(text, str))[:CHARACTERS]


def _tool_names(tools: Any) -> list[str]:
    names = []
    for tool in islice(tools, TOOLS) if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            inner = tool.get("function")
            names.append(_short((inner if isinstance(inner, dict) else tool).get("name")))
    return names


def _short(value: Any) -> str:
    return value[:CHARACTERS] if isinstance(value, str) else ""


@dataclass(frozen=True)
class Choice:
    """The replica that is to take a request, and whether it is the first of the key's order."""

    name: str
    home: bool


def order(key: str, names: Iterable[str]) -> list[str]:
    """The replicas in this key's own order. Taking one away does not change the order of the others."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{key}/{name}".encode()).digest())


def choose(key: str, loads: Mapping[str, int], capacity: int) -> Choice | None:
    """Where a request with this key goes, given how many each replica has; None when all are full."""
    ranked = order(key, loads)
    if not ranked:
        return None
    home = ranked[0]
    fair = math.ceil(SHARE * (sum(loads.values()) + 1) / len(loads))
    if loads[home] < min(max(EASY, fair), capacity):
        return Choice(home, True)
    least = min(ranked, key=loads.__getitem__)  # the first of the order among equals, so that what spills is sticky too
    return Choice(least, least == home) if loads[least] < capacity else None
