"""How text is cut into words before byte-pair merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).

A GGUF file carries vocabulary and merges but only the *name* of the splitting rule. The rules below are those of the
models' own `tokenizer.json` files (the names are the ones llama.cpp gives them in `llama-vocab.cpp`). A wrong rule
still yields plausible tokens and a slightly worse model, so a name that is not listed is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchard.core.errors import UnsupportedFormat

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_AND_NUMBERS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
_LLAMA3 = _WORDS_AND_NUMBERS + "{1,3}" + _REST
_QWEN2 = _WORDS_AND_NUMBERS + _REST

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_REST}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_CASED_REST}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class SplitRule:
    """`steps` are regular expressions applied one after another (each match becomes a word of its own); none means
    the GPT-2 rule built into the byte-level splitter. `digits` first sets every digit apart."""

    steps: tuple[str, ...] = ()
    digits: bool = False
    ignore_merges: bool = False  # a whole word found in the vocabulary is taken without merging
    nfc: bool = False  # the model's tokenizer composes Unicode characters first


_GPT2_RULE = SplitRule()
_DIGITS_RULE = SplitRule(digits=True)
_LLAMA3_RULE = SplitRule(steps=(_LLAMA3,), ignore_merges=True)
_GPT4O_RULE = SplitRule(steps=(_GPT4O,))

RULES: dict[str, SplitRule] = {
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": SplitRule(nfc=True),
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "lfm2": _LLAMA3_RULE,
    "dbrx": SplitRule(steps=(_LLAMA3,)),
    "smaug-bpe": SplitRule(steps=(_LLAMA3,)),
    "qwen2": SplitRule(steps=(_QWEN2,), nfc=True),
    "deepseek-r1-qwen": SplitRule(steps=(_QWEN2,)),
    "tekken": SplitRule(steps=(_TEKKEN,), ignore_merges=True),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    # What llama.cpp does for files written before rules had names.
    "default": SplitRule(steps=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def split_rule(name: str) -> SplitRule:
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedFormat(
            f"unknown pre-tokenizer {name!r} in the GGUF file",
            hint=f"known names: {', '.join(sorted(RULES))}; use the model's Hugging Face folder with tokenizer.json",
        )
    return rule


def byte_level_splitter(rule: SplitRule) -> Any:
    """The `tokenizers` pre-tokenizer for a rule: the splits, then bytes spelled as printable characters."""
    from tokenizers import Regex, pre_tokenizers

    parts: list[Any] = []
    if rule.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    parts += [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in rule.steps]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.steps))
    return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
