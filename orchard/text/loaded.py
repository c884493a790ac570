"""What a tokenizer file gives, before it is wrapped: the same facts whether they came from GGUF or tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from orchard.core.errors import BadFile, OrchardError
from orchard.core.frozen import frozen

T = TypeVar("T")

# Tokens that end an answer in the families we know, beside the one the file calls end-of-sequence: files often name
# only one of several (a chat model ends a turn with the first four, a document with the others).
END_TOKENS = frozenset(
    ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"]
)


@frozen
class Loaded:
    backend: Any  # tokenizers.Tokenizer, or a function that makes one when it is needed
    vocab_size: int
    control_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None


def end_ids(named: Iterable[int | None], control_tokens: dict[str, int]) -> frozenset[int]:
    known = {control_tokens[text] for text in END_TOKENS if text in control_tokens}
    return frozenset({i for i in named if i is not None} | known)


def default_template(template: Any) -> str | None:
    """A chat template is a text, or a list of named ones of which "default" counts."""
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    elif isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def guarded(what: str, build: Callable[[], T]) -> T:
    """Run a call into the `tokenizers` package on data from outside; whatever it raises becomes `BadFile`."""
    try:
        return build()
    except OrchardError:
        raise
    except Exception as error:
        raise BadFile(f"{what}: {error}", hint="the tokenizer is damaged; fetch the model again") from error
    except BaseException as error:
        # A Rust panic arrives as a BaseException of a class that cannot be imported; anything else is not ours.
        if type(error).__name__ != "PanicException":
            raise
        raise BadFile(f"{what}: {error}", hint="the tokenizer is damaged; fetch the model again") from error
