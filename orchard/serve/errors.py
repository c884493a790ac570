"""What a client is told when something is wrong: a status, a stable code, and words that say what to change.

Every error on its way out becomes an `ApiError`; each protocol puts it into its own shape. What nobody meant to happen is a 500
whose words say nothing of our insides.
"""

from __future__ import annotations

from typing import Any

from orchard.core.errors import ContextOverflow, MissingExtra, ModelNotFound, OrchardError, UsageError
from orchard.session.errors import AssetsUnavailableError, RateLimitedError, TimedOutError

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
NO_MEMORY = "no memory"


class ApiError(Exception):
    """`retry_after`: seconds after which the same request may succeed; `param`: the field that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> ApiError:
    """A request that has to be changed."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: {why}", param=param)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of any error."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, OrchardError):
        return ApiError(500, "internal", "the server made a mistake; its log says more")
    words = _words(error)
    if isinstance(error, ContextOverflow):
        hint = (
            f"shorten it by at least {max(1, error.tokens + 1 - error.limit):,} tokens" if error.limit else error.hint
        )
        return ApiError(400, "context_length_exceeded", f"{error.message}: {hint}")
    if isinstance(error, RateLimitedError):
        return ApiError(429, "queue_full", words, retry_after=1)
    if isinstance(error, TimedOutError):
        return ApiError(504, "deadline_exceeded", words)
    if isinstance(error, (ModelNotFound, AssetsUnavailableError)):
        return ApiError(404, "model_not_found", words, param="model")
    if isinstance(error, UsageError) and NO_MEMORY in str(error):
        return ApiError(503, "out_of_memory", words, retry_after=2)
    if isinstance(error, MissingExtra):
        return ApiError(501, "not_installed", words)
    if isinstance(error, UsageError) or error.exit_code == 2:
        return ApiError(400, _code(error), words)
    caller_did_it = _code(error) in _CALLERS
    return ApiError(400 if caller_did_it else 500, _code(error), words)


_CALLERS = frozenset(
    {
        "grammar_stuck",
        "guardrail",
        "image_prompt",
        "invalid_schema",
        "prompt",
        "refusal",
        "template",
        "transcript",
        "unsupported_capability",
        "unsupported_guide",
        "unsupported_language",
    }
)
"""Codes of errors that the client can do something about."""


def _words(error: OrchardError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message


def _code(error: OrchardError) -> str:
    code = error.code.replace("-", "_")
    return _RENAMED.get(code, code)


_RENAMED = {
    "usage": "invalid_request",
    "error": "internal",
    "unsupported_schema": "invalid_schema",
    "bad_grammar": "invalid_schema",
}


def openai_body(error: ApiError) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": error.message, "code": error.code, "details": {"error_code": error.code}}
    return {"type": "error", "error": told}


def body_for(path: str, error: ApiError, request: str | None = None) -> dict[str, Any]:
    """In the shape of the protocol that a path belongs to. `request`: its id, which Anthropic's has beside the error."""
    if not path.startswith("/v1/messages"):
        return openai_body(error)
    return anthropic_body(error) | ({"request_id": request} if request else {})
