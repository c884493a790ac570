"""What an endpoint's refusals mean, as errors of a conversation. No secret is ever part of one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from orchard.core.errors import OrchardError
from orchard.session.errors import (
    AssetsUnavailableError,
    ExceededContextWindowSizeError,
    GenerationError,
    RateLimitedError,
    TimedOutError,
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_NUMBERS = re.compile(r"\d[\d,]*")
_TOO_LONG = ("context_length_exceeded", "maximum context length", "exceeds the available context", "context window")
MOST_WORDS = 300


class Secrets:
    """Texts that no message may hold."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"Secrets({len(self._secrets)})"


def of_status(
    status: int, body: str, retry_after: str | None, place: str, model: str, secrets: Secrets
) -> OrchardError:
    """The error for an answer that is not 200."""
    code, words = _said(body)
    said = _clean(f": {words}" if words else "", secrets)
    about = f"{place} answered {status}{said}"
    if 300 <= status < 400:
        hint = (
            "redirects are not followed, so that a key goes only where it was meant for; give the address it leads to"
        )
        return AssetsUnavailableError(f"{place} answered {status}, a redirect", hint=hint)
    if status in (401, 403):
        return AssetsUnavailableError(
            about, hint="check api_key: it is missing, wrong, or not allowed to use this model"
        )
    if any(sign in f"{code} {words}".lower() for sign in _TOO_LONG) and status in (400, 413, 422, 500):
        limit, tokens = _numbers(words)
        return ExceededContextWindowSizeError(about, tokens=tokens, limit=limit)
    if status == 404:
        return AssetsUnavailableError(about, hint=f"check the address (it mostly ends in /v1) and the model {model!r}")
    if status in (408, 504):
        return TimedOutError(about, hint="try again, or ask for a shorter answer")
    if status == 429:
        return RateLimitedError(about, hint=_retry(retry_after))
    if status >= 500:
        return AssetsUnavailableError(about, hint=f"the fault is the endpoint's; {_retry(retry_after)}")
    hint = "the endpoint does not take this request; `extra={'field': None}` leaves a field out"
    return GenerationError(about, hint=hint)


def of_event(data: str, place: str, model: str, secrets: Secrets) -> OrchardError | None:
    """The error inside a stream that began well; None where a chunk is no error."""
    if '"error"' not in data:
        return None
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(chunk, dict) or not chunk.get("error") or chunk.get("choices"):
        return None
    error = chunk["error"]
    number = error.get("code") if isinstance(error, dict) else None
    status = number if isinstance(number, int) and 400 <= number < 600 else 500
    if isinstance(error, dict) and "rate_limit" in f"{error.get('code')} {error.get('type')}":
        status = 429
    return of_status(status, data, None, place, model, secrets)


def _said(body: str) -> tuple[str, str]:
    """The code and the words of an error, as far as it has OpenAI's shape."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        return "", "" if body.lstrip().startswith("<") else body
    inner = told.get("error", told) if isinstance(told, dict) else told
    if not isinstance(inner, dict):
        return "", str(inner)
    words = inner.get("message") or inner.get("detail") or ""
    return str(inner.get("code") or inner.get("type") or ""), words if isinstance(words, str) else json.dumps(words)


def _clean(words: str, secrets: Secrets) -> str:
    """One line of at most `MOST_WORDS` characters. Secrets go first, or a cut could leave half of one."""
    line = _CONTROL.sub(" ", secrets.hide(words)).rstrip()
    return line if len(line) <= MOST_WORDS else line[:MOST_WORDS] + " …"


def _retry(after: str | None) -> str:
    if after is not None and after.strip().isascii() and after.strip().isdigit() and len(after.strip()) < 7:
        return f"try again in {int(after)} seconds"
    return "try again in a while"


def _numbers(words: str) -> tuple[int, int]:
    """The limit and the tokens, where the words hold both: the larger is what was too long."""
    found = [int(number.replace(",", "")) for number in _NUMBERS.findall(words)[:8] if len(number) < 12]
    large = sorted({number for number in found if number >= 16})
    return (large[0], large[-1]) if len(large) >= 2 else (0, 0)
