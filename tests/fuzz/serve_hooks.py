"""What schemathesis is told beside the description: the model's name, and answers of a few tokens.

Without it almost every request would end at "no such model" and never reach what lies behind. `serve_fuzz.py --schemathesis`
names this file in SCHEMATHESIS_HOOKS; it is imported by that program, in its environment, and nowhere else.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ.get("ORCHARD_FUZZ_MODEL", "smollm2")
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A body as it was made, but for a model that is there and an end that comes soon."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
        for name in SHORT:
            if isinstance(body.get(name), int) and not isinstance(body[name], bool) and body[name] > 8:
                body[name] = 8
    return body
