"""A tokenizer from the `tokenizer.ggml.*` keys of a GGUF file.

Two kinds of vocabulary are common: byte-level BPE with merges ("gpt2"), and SentencePiece BPE with scores ("llama"),
whose merges are rebuilt here: joining two entries gives a third, and the third's score is the merge's priority.
"gemma4" is the second kind of vocabulary with merges written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchard.core.errors import BadFile, MissingTokenizer, UnsupportedFormat
from orchard.text.loaded import END_TOKENS, Loaded, default_template, end_ids, guarded
from orchard.text.pretokenizers import byte_level_splitter, split_rule
from orchard.text.spelling import SPACE_MARK

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer.ggml."
_BAD_HINT = "the file is damaged or was written by a broken converter; fetch it again"
# Keys whose ids are control tokens even where the token types are missing or wrong.
_CONTROL_KEYS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "padding_token_id")


def load_gguf(metadata: Mapping[str, Any]) -> Loaded:
    kind = metadata.get(_PREFIX + "model")
    if kind is None or metadata.get(_PREFIX + "tokens") is None:
        raise MissingTokenizer(
            "the GGUF file holds no tokenizer", hint="use a GGUF file with tokenizer.ggml.* keys, or a model folder"
        )
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, tokens)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind in ("llama", "gemma4"):
        backend = _pieces(metadata, tokens, types, kind)
    else:
        raise UnsupportedFormat(
            f"unknown tokenizer model {kind!r} in the GGUF file", hint="known: gpt2, llama, gemma4 (byte-pair encoding)"
        )
    _add_tokens(backend, tokens, types)
    control = {text: i for i, (text, type_) in enumerate(zip(tokens, types)) if type_ == CONTROL}
    ids = {key: _token_id(metadata, key, len(tokens)) for key in _CONTROL_KEYS}
    bos = ids["bos_token_id"]
    add_bos = bool(metadata.get(_PREFIX + "add_bos_token", _adds_bos_by_default(metadata, kind))) and bos is not None
    if add_bos and bos is not None:
        _prepend_bos(backend, tokens[bos], bos)
    return Loaded(
        backend=backend,
        vocab_size=len(tokens),
        control_ids=frozenset(control.values()),
        bos_id=bos,
        eos_id=ids["eos_token_id"],
        eos_ids=end_ids((ids["eos_token_id"], ids["eot_token_id"], ids["eom_token_id"]), control),
        add_bos=add_bos,
        chat_template=default_template(metadata.get("tokenizer.chat_template")),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = split_rule(str(metadata.get(_PREFIX + "pre", "default")))
    vocab = _vocab(tokens)
    merges = _written_merges(metadata, vocab)
    # No unknown token: a byte without an entry is dropped, as the original tokenizers of these models do.
    model = guarded(
        "cannot build the vocabulary", lambda: models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    )
    backend = Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_splitter(rule)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(metadata: Mapping[str, Any], tokens: list[str], types: list[int], kind: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = _vocab(tokens)
    merges = _written_merges(metadata, vocab) if kind == "gemma4" else _scored_merges(metadata, tokens, types)
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    has_bytes = types.count(BYTE) == 256 or f"<0x{0:02X}>" in vocab
    model = guarded(
        "cannot build the vocabulary",
        lambda: models.BPE(
            vocab=vocab,
            merges=merges,
            byte_fallback=has_bytes,
            fuse_unk=True,
            unk_token=tokens[unknown] if unknown is not None and types[unknown] == UNKNOWN else None,
        ),
    )
    backend = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if bool(metadata.get(_PREFIX + "add_space_prefix", kind == "llama")):
        spaces.insert(0, normalizers.Prepend(SPACE_MARK))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _scored_merges(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    scores = _array(metadata, "scores")
    if scores is None or len(scores) != len(tokens):
        raise BadFile("the GGUF tokenizer needs one score per token", hint=_BAD_HINT)
    return merges_from_scores(scores, tokens, types)


def merges_from_scores(scores: Sequence[Any], tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, best first: whatever two entries make a third, by the third's score."""
    # Only ordinary entries merge: control, byte and user-defined ones are never built out of pieces.
    score = {text: float(value) for text, value, type_ in zip(tokens, scores, types) if type_ == NORMAL}
    found: list[tuple[float, int, str, str]] = []
    for text, priority in score.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in score and right in score:
                found.append((-priority, -cut, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _written_merges(metadata: Mapping[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in _strings(metadata, "merges"):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        # Checked here because the package below aborts on a merge outside its vocabulary.
        if cut < 1 or left not in vocab or right not in vocab or left + right not in vocab:
            raise BadFile(f"the GGUF tokenizer has a merge outside its vocabulary: {line[:40]!r}", hint=_BAD_HINT)
        merges.append((left, right))
    return merges


def _add_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined entries are matched whole in the text, before anything is split; so is "unknown", which the same
    model's tokenizer.json calls special."""
    from tokenizers import AddedToken

    for matched, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(t, special=special, normalized=False) for t, kind in zip(tokens, types) if kind in matched and t
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _prepend_bos(backend: Any, text: str, token_id: int) -> None:
    """Only matters for the exported tokenizer.json: Orchard itself adds the token where asked to."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", f"{text}:1", "$B:1"], special_tokens=[(text, token_id)]
    )


def _adds_bos_by_default(metadata: Mapping[str, Any], kind: str) -> bool:
    return kind != "gpt2" or split_rule(str(metadata.get(_PREFIX + "pre", "default"))).ignore_merges


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for index, text in enumerate(tokens):
        vocab.setdefault(text, index)
    return vocab


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    given = _array(metadata, "token_type")
    types = [NORMAL] * len(tokens) if given is None else [int(value) for value in given]
    if len(types) != len(tokens):
        raise BadFile("the GGUF tokenizer needs one type per token", hint=_BAD_HINT)
    for key in _CONTROL_KEYS:
        index = _token_id(metadata, key, len(tokens))
        if index is not None and types[index] in (NORMAL, USER_DEFINED):
            types[index] = CONTROL
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    if given is None and unknown is not None and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    # Some converters write end-of-turn tokens as user-defined; then user text could end a turn.
    return [CONTROL if t == USER_DEFINED and text in END_TOKENS else t for text, t in zip(tokens, types)]


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    # Converters write -1 or 2^32-1 for "none".
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if type(value) is not int:
        raise BadFile(f"{_PREFIX + key} is no token id", hint=_BAD_HINT)
    if not 0 <= value < count:
        raise BadFile(f"{_PREFIX + key} is {value}, outside the vocabulary of {count}", hint=_BAD_HINT)
    return value


def _array(metadata: Mapping[str, Any], key: str) -> Sequence[Any] | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise BadFile(f"{_PREFIX + key} is not an array", hint=_BAD_HINT)
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = _array(metadata, key)
    if value is None or not all(isinstance(text, str) for text in value):
        raise BadFile(f"{_PREFIX + key} is missing or not a list of texts", hint=_BAD_HINT)
    return list(value)
