"""What a server is told before it starts. Plain data: it travels to other machines as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The most of everything that one request, one client or all together may have."""

    body_bytes: int = 8 * MIB
    messages: int = 2048
    choices: int = 16
    """`n`, and all prompts of one request times it."""
    prompts: int = 64
    inputs: int = 1024
    """Texts of one request for embeddings."""
    stops: int = 16
    stop_chars: int = 256
    tools: int = 128
    bias: int = 1024
    schema_bytes: int = 256 * 1024
    schema_depth: int = 64
    max_tokens: int | None = None
    """New tokens of one answer; None: as many as the context has room for."""
    running: int = 32
    """Answers at a time."""
    queue: int = 128
    """Answers that wait for their turn; more are refused with 429."""
    per_client: int = 64
    """Answers of one client that run or wait."""
    deadline: float = 600.0
    """Seconds from a request's coming to its last token."""
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    """How long a connection may lie idle between two requests."""
    connections: int = 2048
    drain_seconds: float = 60.0
    """How long running answers may take after the server was asked to stop."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that clients may ask for. `source`: a name of the library, or a path. `adapters`: name → folder. `draft`: a smaller
    model that guesses tokens for it, by name or path. `experts_budget`: bytes of memory for its experts, which stay on disk.
    `conversation`: bytes that the keys and values of one conversation stay within, however long it gets; `conversations`: how
    many of them are remembered from one request to the next."""

    name: str
    source: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft: str | None = None
    experts_budget: int | None = None
    conversation: int | None = None
    conversations: int = 4


@dataclass(frozen=True)
class Settings:
    models: tuple[ModelSpec, ...]
    """The first is the default one."""
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    """SHA-256 of the keys that are let in, hexadecimal; none: everybody is."""
    hosts: tuple[str, ...] = ()
    """Names besides this machine's own that `Host` may have."""
    origins: tuple[str, ...] = ()
    """Pages besides our own whose scripts may ask."""
    tls_cert: str | None = None
    tls_key: str | None = None
    memory: int | None = None
    """Bytes that loaded models may take together; None: half of what the machine has left."""
    any_model: bool = False
    """Whether clients may ask for every model of the library, not only for those that are named."""
    page: bool = True
    limits: Limits = field(default_factory=Limits)
