"""A tokenizer from `tokenizer.json` and the small JSON files that lie beside it in a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchard.core.errors import BadFile, MissingTokenizer
from orchard.text.loaded import Loaded, default_template, end_ids, guarded

_MAX_BYTES = 256 * 2**20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_file(
    path: Path,
    config: Mapping[str, Any] | None = None,
    special_map: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Loaded:
    return _loaded(path, _read(path), config, special_map, generation_config)


def load_bytes(
    data: bytes,
    config: Mapping[str, Any] | None = None,
    special_map: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Loaded:
    """The same from the bytes of a tokenizer.json that lies inside another file."""
    name = Path("tokenizer.json")
    try:
        source = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"{name} is not UTF-8 text: {error}", hint="fetch the model again") from error
    return _loaded(name, _parsed(name, source), config, special_map, generation_config)


def _loaded(
    path: Path,
    found: tuple[dict[str, Any], str],
    config: Mapping[str, Any] | None,
    special_map: Mapping[str, Any] | None,
    generation_config: Mapping[str, Any] | None,
) -> Loaded:
    facts = {**(special_map or {}), **(config or {})}
    tree, source = found
    backend = _build(path, tree, source)
    _add_from_config(backend, facts)
    control, unknown = _control_ids(backend, tree)
    bos = _id_of(backend, facts.get("bos_token"))
    eos = _id_of(backend, facts.get("eos_token"))
    control_tokens = {backend.id_to_token(i): i for i in control}
    generated = (generation_config or {}).get("eos_token_id")
    named = generated if isinstance(generated, list) else [generated]
    add_bos = facts.get("add_bos_token")
    if add_bos is None:
        probe = guarded("cannot use tokenizer.json", lambda: backend.encode("").ids)
        add_bos = bos is not None and bos in probe[:1]
    if bos is None:
        bos = _id_of_int((generation_config or {}).get("bos_token_id"))
    return Loaded(
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        # A file may use one token for "unknown" and for "end": then it controls, and counts as such.
        control_ids=frozenset(control - ({unknown} - {bos, eos})),
        bos_id=bos,
        eos_id=eos,
        eos_ids=end_ids([eos, *map(_id_of_int, named)], control_tokens),
        add_bos=bool(add_bos) and bos is not None,
        chat_template=default_template(facts.get("chat_template")),
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadFile(f"{path.name} is larger than any tokenizer", hint="check that the right file was given")
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingTokenizer(f"there is no {path}", hint="the model folder needs a tokenizer.json") from None
    except OSError as error:
        raise MissingTokenizer(f"cannot read {path}: {error.strerror}", hint="check the path and its rights") from error
    except ValueError as error:
        raise BadFile(f"{path} is not valid JSON: {error}", hint="fetch the model again") from error
    return _parsed(path, source)


def _parsed(path: Path, source: str) -> tuple[dict[str, Any], str]:
    try:
        tree = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not valid JSON: {error}", hint="fetch the model again") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise BadFile(f"{path} is JSON, but not a tokenizer", hint="fetch the model again")
    return tree, source


def _build(path: Path, tree: dict[str, Any], source: str) -> Any:
    from tokenizers import Tokenizer

    _check_merges(path, tree["model"])
    backend = guarded(f"{path} cannot be used", lambda: Tokenizer.from_str(source))
    # Settings left over from training would cut or pad every text.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_merges(path: Path, model: dict[str, Any]) -> None:
    """The package below aborts, with a page on stderr, on a merge outside its vocabulary."""
    vocab, merges = model.get("vocab"), model.get("merges")
    if model.get("type", "BPE") != "BPE" or not isinstance(vocab, dict) or not isinstance(merges, list):
        return
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        known = (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) and part in vocab for part in pair)
        )
        if not known or pair[0] + pair[1] not in vocab:
            raise BadFile(f"{path} has a merge outside its vocabulary: {merge!r}"[:200], hint="fetch the model again")


def _add_from_config(backend: Any, facts: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json names, and names that make a token a control token."""
    from tokenizers import AddedToken

    listed = facts.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for key, entry in sorted(listed.items(), key=lambda item: str(item[0]).zfill(12)):
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                continue
            flags = {f: bool(entry.get(f, False)) for f in ("lstrip", "rstrip", "normalized", "single_word", "special")}
            wanted = _id_of_int(key)
            if backend.token_to_id(entry["content"]) == wanted or wanted == backend.get_vocab_size():
                backend.add_tokens([AddedToken(entry["content"], **flags)])
    extra = facts.get("additional_special_tokens")
    names = [_text_of(facts.get(name)) for name in _NAMED]
    names += [_text_of(item) for item in extra] if isinstance(extra, list) else []
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in names:
        if text and text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _control_ids(backend: Any, tree: dict[str, Any]) -> tuple[set[int], int | None]:
    control = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    model = tree["model"]
    unknown = _id_of(backend, model.get("unk_token"))
    return control, unknown if unknown is not None else _id_of_int(model.get("unk_id"))


def _text_of(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _id_of(backend: Any, token: Any) -> int | None:
    text = _text_of(token)
    return backend.token_to_id(text) if text else None


def _id_of_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
