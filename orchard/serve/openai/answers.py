"""What all answers in OpenAI's shape have: an id, a time, a fingerprint, and the count of tokens."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from typing import Any

from orchard.core.version import VERSION
from orchard.session.turn import Usage


def new_id(kind: str) -> str:
    """Such as `chatcmpl-…`."""
    return f"{kind}-{secrets.token_hex(14)}"


def fingerprint(model: str) -> str:
    """The same while the same version of Orchard answers for the same name."""
    return "fp_" + hashlib.sha256(f"{VERSION}\n{model}".encode()).hexdigest()[:10]


def head(kind: str, object: str, model: str) -> dict[str, Any]:
    """The fields that stand before the choices, in every chunk of a stream the same."""
    return {
        "id": new_id(kind),
        "object": object,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(model),
    }


def usage_of(read: Iterable[Usage], written: Iterable[Usage]) -> dict[str, Any]:
    """`read`: of one answer to each prompt, so that a prompt counts once however many answers it has."""
    prompts, answers = sum(read, Usage()), sum(written, Usage())
    return {
        "prompt_tokens": prompts.input,
        "completion_tokens": answers.output,
        "total_tokens": prompts.input + answers.output,
        "prompt_tokens_details": {"cached_tokens": prompts.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": answers.reasoning, "audio_tokens": 0},
    }
