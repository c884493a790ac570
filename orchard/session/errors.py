"""The errors of a conversation, named as in Apple's Foundation Models SDK and rooted in `OrchardError`.

So `except fm.GenerationError` and `except orchard.OrchardError` both catch them. Each still has `code`, `hint` and
`retryable`; `status` is the SDK's number for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar

from orchard.core.errors import ContextOverflow, OrchardError


class GenerationErrorCode(IntEnum):
    """The SDK's status numbers."""

    SUCCESS = 0
    EXCEEDED_CONTEXT_WINDOW_SIZE = 1
    ASSETS_UNAVAILABLE = 2
    GUARDRAIL_VIOLATION = 3
    UNSUPPORTED_GUIDE = 4
    UNSUPPORTED_LANGUAGE_OR_LOCALE = 5
    DECODING_FAILURE = 6
    RATE_LIMITED = 7
    CONCURRENT_REQUESTS = 8
    REFUSAL = 9
    INVALID_SCHEMA = 10
    UNKNOWN_ERROR = 255


class FoundationModelsError(OrchardError):
    """The root of what goes wrong in a conversation."""

    code = "conversation"
    status: ClassVar[GenerationErrorCode] = GenerationErrorCode.UNKNOWN_ERROR

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        # Not `super`: an error that is also one of the engine's has a relative with other arguments.
        OrchardError.__init__(self, message or (type(self).__doc__ or "").strip().splitlines()[0], hint=hint)


class GenerationError(FoundationModelsError):
    """An answer could not be made."""

    code = "generation"


class ExceededContextWindowSizeError(GenerationError, ContextOverflow):
    """The conversation is longer than the model's context. Nothing was cut."""

    code = "context-overflow"
    status = GenerationErrorCode.EXCEEDED_CONTEXT_WINDOW_SIZE

    def __init__(self, message: str = "", *, tokens: int = 0, limit: int = 0, hint: str = "") -> None:
        GenerationError.__init__(
            self,
            message or f"the conversation has {tokens:,} tokens but the context window holds {limit:,}",
            hint=hint or "start a new session, or give this one a context policy (see orchard.session.policies)",
        )
        self.tokens, self.limit = tokens, limit


class AssetsUnavailableError(GenerationError):
    """The model is not here: it was not pulled, or models are forbidden."""

    code = "assets-unavailable"
    retryable = True
    status = GenerationErrorCode.ASSETS_UNAVAILABLE


class GuardrailViolationError(GenerationError):
    """A prompt or an answer is against the safety policy. `violation` says which category, where and by which rule."""

    code = "guardrail"
    status = GenerationErrorCode.GUARDRAIL_VIOLATION

    def __init__(self, message: str = "", *, violation: Any = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.violation = violation


class UnsupportedGuideError(GenerationError):
    """A guide does not fit the type it is on."""

    code = "unsupported-guide"
    exit_code = 2
    status = GenerationErrorCode.UNSUPPORTED_GUIDE


class UnsupportedLanguageOrLocaleError(GenerationError):
    """The model does not know this language."""

    code = "unsupported-language"
    status = GenerationErrorCode.UNSUPPORTED_LANGUAGE_OR_LOCALE


class DecodingFailureError(GenerationError):
    """What the model wrote could not be read as what was asked for; `raw` is what it wrote."""

    code = "decoding-failure"
    retryable = True
    status = GenerationErrorCode.DECODING_FAILURE

    def __init__(self, message: str = "", *, raw: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.raw = raw


class RateLimitedError(GenerationError):
    """Too many requests at a time."""

    code = "rate-limited"
    retryable = True
    status = GenerationErrorCode.RATE_LIMITED


class ConcurrentRequestsError(GenerationError):
    """The session is already answering, and what was asked for cannot wait its turn."""

    code = "concurrent-requests"
    retryable = True
    status = GenerationErrorCode.CONCURRENT_REQUESTS


class RefusalError(GenerationError):
    """The model will not answer this. `explanation` says why, as far as is known."""

    code = "refusal"
    status = GenerationErrorCode.REFUSAL

    def __init__(self, message: str = "", explanation_entries: Sequence[Any] | None = None, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.explanation_entries = list(explanation_entries or ())

    @property
    def explanation(self) -> str:
        return "\n".join(str(getattr(entry, "text", entry)) for entry in self.explanation_entries)


class TimedOutError(GenerationError):
    """The answer, or a tool that it waited for, took longer than it may."""

    code = "timeout"
    retryable = True


class UnsupportedCapabilityError(GenerationError):
    """The model behind this session cannot do that: images for a model of text, logprobs of an endpoint without them."""

    code = "unsupported-capability"
    exit_code = 2


class InvalidGenerationSchemaError(FoundationModelsError):
    """A schema that no answer can be made from."""

    code = "invalid-schema"
    exit_code = 2
    status = GenerationErrorCode.INVALID_SCHEMA


class TranscriptError(GenerationError):
    """A transcript that cannot be read: damaged, of another version, or changed while an answer is on its way."""

    code = "transcript"
    exit_code = 2


class ToolCallError(FoundationModelsError):
    """A tool could not be called, or failed."""

    code = "tool-call"

    def __init__(self, tool_name: str, underlying_error: BaseException, *, hint: str = "") -> None:
        super().__init__(f"the tool {tool_name!r} failed: {underlying_error}", hint=hint)
        self.tool_name = tool_name
        self.underlying_error = underlying_error


class PromptError(OrchardError):
    """A prompt that no model can be given."""

    code = "prompt"
    exit_code = 2


class ImagePromptError(PromptError):
    """An image that is not there, or a model that sees none."""

    code = "image-prompt"
