"""Typed errors. Each says what went wrong in one line, what to do next, and whether trying again can help.

`code` is a stable, machine-readable name; `hint` is the next step for a person; `retryable` tells a caller whether
the same call may succeed later; `exit_code` is what the command line returns (2 for wrong usage, 1 for a failure).
"""

from __future__ import annotations

from typing import ClassVar


class OrchardError(Exception):
    """The root of every error that Orchard raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders (workers, pools) with their hints and counts."""
        return _restore, (type(self), self.message, dict(self.__dict__))

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "retryable": self.retryable}


def _restore(kind: type[OrchardError], message: str, state: dict[str, object]) -> OrchardError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class UsageError(OrchardError):
    """The caller asked for something that makes no sense: a wrong flag, an empty prompt, an impossible number."""

    code = "usage"
    exit_code = 2


class ConfigError(OrchardError):
    """A config tree is incomplete, contradictory, or names something that does not exist."""

    code = "config"


class UnsupportedPair(ConfigError):
    """Two parts that cannot work together were put into one tree; both are named."""

    code = "unsupported-pair"


class ModelNotFound(OrchardError):
    """No model of that name in the library, and no file or folder at that path."""

    code = "model-not-found"
    exit_code = 2


class BadFile(OrchardError):
    """A file is truncated, corrupt, or not what its name says."""

    code = "bad-file"


class UnknownArchitecture(BadFile):
    """The file is sound, but holds a model family that Orchard does not know."""

    code = "unknown-architecture"


class UnsupportedFormat(BadFile):
    """The file is sound, but uses a tensor type or option that Orchard does not read."""

    code = "unsupported-format"


class MissingTokenizer(OrchardError):
    """A model was found without a tokenizer."""

    code = "missing-tokenizer"


class TemplateError(OrchardError):
    """A chat template is wrong, too expensive, or asks for something it may not have."""

    code = "template"


class ContextOverflow(OrchardError):
    """Input (plus the room asked for the answer) is longer than the model's context. Nothing was cut."""

    code = "context-overflow"

    def __init__(self, *, tokens: int, limit: int, hint: str = "") -> None:
        super().__init__(
            f"the input has {tokens:,} tokens but the context holds {limit:,}",
            hint=hint or f"shorten the input by at least {tokens - limit:,} tokens",
        )
        self.tokens = tokens
        self.limit = limit


class Offline(OrchardError):
    """A step needs the network, and the network was not asked for or is not there."""

    code = "offline"


class DownloadFailed(OrchardError):
    """A download broke off or its checksum is wrong. What was in the library is still there."""

    code = "download-failed"
    retryable = True


class DiskFull(OrchardError):
    """No room to write a file. Nothing half-written was left behind."""

    code = "disk-full"
    retryable = True


class MissingExtra(OrchardError):
    """An optional dependency is needed for this and is not installed."""

    code = "missing-extra"


class Cancelled(OrchardError):
    """The caller cancelled the work."""

    code = "cancelled"
    retryable = True
    exit_code = 130
