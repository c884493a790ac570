"""A tokenizer as the `tokenizer.ggml.*` keys of a GGUF file: the way back of `from_gguf`.

GGUF has words for two kinds of vocabulary: byte-level BPE, whose splitting rule it only names ("gpt2"), and SentencePiece BPE
("llama"), whose merges it keeps as one score per entry; "gemma4" is the latter with merges written out. A tokenizer that is
neither, or has a part for which there is no key, is refused by the name of that part: a file that nearly says it would give
other tokens, and nobody would notice.
"""

from __future__ import annotations

import json
from typing import Any

from orchard.core.errors import UnsupportedFormat
from orchard.text.from_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, merges_from_scores
from orchard.text.loaded import END_TOKENS
from orchard.text.pretokenizers import RULES, SplitRule
from orchard.text.spelling import SPACE_MARK, byte_of_character
from orchard.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_FOLDER = "export a Hugging Face folder instead, which keeps tokenizer.json as it is"
# Of several names for one rule, the one that other readers have known longest.
_PREFERRED = ("gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken")
_NEVER_REACHED = -1e6
"""The score of an entry that no merge makes: below all others, as SentencePiece does with what is matched whole."""
Tree = dict[str, Any]


def gguf_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The keys for a tokenizer. `rows` of the model's embedding: other readers want a text for each."""
    tree: Tree = json.loads(tokenizer.to_json())
    model = tree["model"]
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise _refused(f"a vocabulary of type {kind}", "GGUF files that Orchard reads hold byte-pair encodings")
    for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(part):
            raise _refused(f"{part} = {model[part]!r}")
    _refuse_stripping(tree)
    tokens, types = _entries(tokenizer, model, rows)
    if tokenizer.spelling.kind == "byte-level":
        found = _byte_level(tree, tokens)
    elif tokenizer.spelling.kind == "pieces":
        found = _pieces(tree, tokens, types)
    else:
        raise _refused("entries that are neither bytes nor SentencePiece's")
    found |= {f"{_PREFIX}tokens": tokens, f"{_PREFIX}token_type": types, **_special(tokenizer, model)}
    if tokenizer.chat_template:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _refused(part: str, hint: str = _FOLDER) -> UnsupportedFormat:
    return UnsupportedFormat(f"GGUF has no words for this tokenizer: {part}", hint=hint)


def _entries(tokenizer: Tokenizer, model: Tree, rows: int) -> tuple[list[str], list[int]]:
    """Texts and types by id. Rows of the embedding without an entry get a text that nothing is ever cut into."""
    texts = {i: text for text, i in model["vocab"].items()}
    added = tokenizer.added_tokens
    texts |= {i: token.content for i, token in added.items()}
    count = max(texts, default=-1) + 1
    if count > rows:
        raise _refused(f"{count:,} entries for an embedding of {rows:,} rows", "the model and its tokenizer disagree")
    unknown = model["vocab"].get(model.get("unk_token"))
    tokens, types = [], []
    for i in range(rows):
        tokens.append(texts.get(i, f"[PAD{i}]"))
        if i not in texts:
            types.append(UNUSED)
        elif i in tokenizer.control_ids:
            types.append(CONTROL)
        elif i == unknown and i in added:
            types.append(UNKNOWN)
        elif i in added:
            types.append(USER_DEFINED)
        else:
            types.append(BYTE if model.get("byte_fallback") and _is_byte(texts[i]) else NORMAL)
    if unknown is not None and model.get("byte_fallback") and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    return tokens, types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _refuse_stripping(tree: Tree) -> None:
    for token in tree.get("added_tokens", ()):
        odd = [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]
        if odd:
            raise _refused(f"{odd[0]} of the token {token['content'][:40]!r}")


def _steps(part: Tree | None, inside: str) -> list[Tree]:
    """The parts of a normalizer, splitter or decoder, whether it is one or a sequence of them."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part[inside] for step in _steps(inner, inside)]
    return [part]


# Byte-level BPE ---------------------------------------------------------------------------------------------------------


def _byte_level(tree: Tree, tokens: list[str]) -> dict[str, Any]:
    model = tree["model"]
    missing = byte_of_character().keys() - model["vocab"].keys()
    if model.get("byte_fallback") or (missing and model.get("unk_token")):
        raise _refused("a byte-level vocabulary that does not hold every byte, and says what stands for the others")
    rule = _rule(tree)
    known = [name for name in (*_PREFERRED, *RULES) if RULES[name] == rule]
    if not known:
        raise _refused(f"a splitting rule without a name there: {_shown(tree)}")
    merges = [" ".join(_pair(merge)) for merge in model["merges"]]
    return {f"{_PREFIX}model": "gpt2", f"{_PREFIX}pre": known[0], f"{_PREFIX}merges": merges}


def _rule(tree: Tree) -> SplitRule | None:
    """What cuts a text into words, in the terms of `pretokenizers`; None where those cannot say it."""
    normalizers = [step.get("type") for step in _steps(tree.get("normalizer"), "normalizers")]
    if normalizers not in ([], ["NFC"]):
        raise _refused(f"the normalizer {', '.join(map(str, normalizers))}")
    steps = _steps(tree.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    digits = steps[0] == {"type": "Digits", "individual_digits": True}
    patterns = [_isolated(step) for step in steps[1 if digits else 0 : -1]]
    # Without a pattern of its own the byte-level splitter has to bring GPT-2's; with one, it must not.
    if None in patterns or bool(steps[-1].get("use_regex", True)) == bool(patterns):
        return None
    texts = tuple(pattern for pattern in patterns if pattern is not None)
    return SplitRule(texts, digits, bool(tree["model"].get("ignore_merges")), normalizers == ["NFC"])


def _isolated(step: Tree) -> str | None:
    """The expression of a splitter that makes each match a word. (Removing what does not match says the same where the
    expression matches everything, as these do.)"""
    if step.get("type") != "Split":
        return None
    plain = step.get("behavior") == "Isolated" and not step.get("invert")
    turned = step.get("behavior") == "Removed" and step.get("invert")
    return step.get("pattern", {}).get("Regex") if plain or turned else None


def _shown(tree: Tree) -> str:
    return ", ".join(str(step.get("type")) for step in _steps(tree.get("pre_tokenizer"), "pretokenizers")) or "none"


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    if " " in left or " " in right:
        raise _refused("a merge of entries with spaces")
    return left, right


# SentencePiece ----------------------------------------------------------------------------------------------------------


def _pieces(tree: Tree, tokens: list[str], types: list[int]) -> dict[str, Any]:
    model = tree["model"]
    prefix = _adds_space(tree)
    if not model.get("byte_fallback") or types.count(BYTE) != 256:
        raise _refused("SentencePiece entries without one for each byte")
    # Only ordinary entries are made by merging; what is matched whole in the text never gets there.
    ordinary = {text for text, type_ in zip(tokens, types) if type_ == NORMAL}
    pairs = [_pair(merge) for merge in model["merges"]]
    merges = [pair for pair in pairs if ordinary.issuperset((*pair, pair[0] + pair[1]))]
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    scores = [float(-rank[text]) if text in rank else _NEVER_REACHED for text in tokens]
    keys = {f"{_PREFIX}add_space_prefix": prefix, f"{_PREFIX}scores": scores}
    rebuilt = merges_from_scores(scores, tokens, types)
    # Several ways to make one entry share its score, so their order among themselves is free, and nothing else is.
    if set(rebuilt) == set(merges) and [a + b for a, b in rebuilt] == [a + b for a, b in merges]:
        return keys | {f"{_PREFIX}model": "llama", f"{_PREFIX}pre": "default"}
    if prefix:
        raise _refused("merges whose order no scores of entries give")
    return keys | {f"{_PREFIX}model": "gemma4", f"{_PREFIX}merges": [" ".join(pair) for pair in pairs]}


def _adds_space(tree: Tree) -> bool:
    """Whether a space goes before every stretch of text."""
    steps = _steps(tree.get("normalizer"), "normalizers")
    prefix = bool(steps) and steps[0] == {"type": "Prepend", "prepend": SPACE_MARK}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    splits = _steps(tree.get("pre_tokenizer"), "pretokenizers")
    if steps[1 if prefix else 0 :] == [spaces]:
        # Gemma's files also split at spaces, of which the normalizer has left none.
        if all(step.get("type") == "Split" and step.get("pattern") == {"String": " "} for step in splits):
            return prefix
        raise _refused(f"the splitter {_shown(tree)} beside SentencePiece entries")
    if not steps and len(splits) == 1 and splits[0].get("type") == "Metaspace":
        # It adds a space only where there is none yet, or before the first stretch only; a GGUF file always, or never.
        scheme = splits[0].get("prepend_scheme", "always")
        if splits[0].get("split", True) or splits[0].get("replacement") != SPACE_MARK or scheme != "never":
            raise _refused(f"Metaspace with prepend_scheme {scheme!r} and split {splits[0].get('split', True)}")
        return False
    raise _refused("the normalizer " + (", ".join(str(step.get("type")) for step in steps) or "none"))


# Ids --------------------------------------------------------------------------------------------------------------------


def _special(tokenizer: Tokenizer, model: Tree) -> dict[str, Any]:
    """Ids with a role. A reader knows some texts that end an answer by itself; there are two keys for others."""
    found: dict[str, Any] = {f"{_PREFIX}add_bos_token": tokenizer.add_bos}
    known = {tokenizer.control_tokens[text] for text in END_TOKENS if text in tokenizer.control_tokens}
    others = sorted(tokenizer.eos_ids - known - {tokenizer.eos_id})
    if len(others) > 2:
        raise _refused(f"{len(others)} ids that end an answer beside the usual ones: {others[:5]}")
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, **dict(zip(("eot", "eom"), others))}
    ids["unknown"] = model["vocab"].get(model.get("unk_token"))
    return found | {f"{_PREFIX}{role}_token_id": i for role, i in ids.items() if i is not None}
