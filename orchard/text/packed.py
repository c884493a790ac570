"""A tokenizer as a few arrays, from which it is made again in half the time that its JSON takes to parse.

Nearly all of a tokenizer.json is the vocabulary and the merges, which repeat each other. Here the vocabulary is one text with
its entries in the order of their ids, and a merge is a pair of ids. A tokenizer that does not fit this form keeps its JSON.
Byte-level vocabularies have their merges sorted (`orchard.text.merges`), so that most texts are encoded without making the
tokenizer at all.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from orchard.core.errors import BadFile
from orchard.text.frames import Frame, frame_of
from orchard.text.loaded import Loaded, guarded
from orchard.text.merges import ARRAYS, PAIRS, RANKS, VOCABULARY, Merges, merge_arrays
from orchard.text.tokenizer import Tokenizer

WHOLE, LEFT, RIGHT = (f"tokenizer.{name}" for name in ("json", "left", "right"))
_AGAIN = "the packed file is damaged; `orchard pull` makes it again"
_NUMBERS = ("vocab_size", "bos_id", "eos_id")
_SETS = ("control_ids", "eos_ids")


def pack(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `unpack` takes: facts that JSON can say, and arrays."""
    facts: dict[str, Any] = {name: getattr(tokenizer, name) for name in (*_NUMBERS, "add_bos", "chat_template")}
    facts |= {name: sorted(getattr(tokenizer, name)) for name in _SETS}
    frame = frame_of(tokenizer)
    facts["frame"] = frame.to_list() if frame is not None else None
    text = tokenizer.to_json()
    tree = json.loads(text)
    arrays = _split(tree)
    # Made again once, here, so that a difference shows where the whole JSON is still at hand.
    if arrays is not None and _json_of(tree, arrays) == text:
        pairs = list(zip(arrays[LEFT].tolist(), arrays[RIGHT].tolist(), strict=True))
        sorted_out = merge_arrays(tree, _tokens(arrays), pairs)
        if sorted_out is not None:
            facts["merges"], more = sorted_out
            arrays = {VOCABULARY: arrays[VOCABULARY], **more}
        return facts | {"tree": tree}, arrays
    return facts, {WHOLE: _as_bytes(text)}


def unpack(
    facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], verify: Callable[..., None] | None = None
) -> Tokenizer:
    """The tokenizer that was packed; `BadFile` where facts or arrays are not what `pack` gives.

    `verify` is given the names of arrays before they are used, and raises where they are damaged.
    """
    check = verify if verify is not None else lambda *names: None
    return guarded("the packed tokenizer cannot be used", lambda: _unpacked(facts, arrays, check))


def _unpacked(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], verify: Callable[..., None]) -> Tokenizer:
    numbers = {name: facts[name] for name in _NUMBERS}
    sets = {name: facts[name] for name in _SETS}
    listed = [*(value for value in numbers.values() if value is not None), *(i for ids in sets.values() for i in ids)]
    if not all(type(number) is int and number >= 0 for number in listed) or numbers["vocab_size"] is None:
        raise BadFile("the packed tokenizer has ids that are none", hint=_AGAIN)
    template = facts["chat_template"]
    if not isinstance(template, str | None):
        raise BadFile("the packed tokenizer has a chat template that is no text", hint=_AGAIN)
    merges: Merges | None = None
    backend: Any
    if facts.get("merges") is not None:
        verify(*ARRAYS)
        merges = Merges(facts["merges"], facts["tree"]["added_tokens"], arrays)
        backend = partial(guarded, "the packed tokenizer cannot be used", lambda: _backend(facts, arrays, verify))
    else:
        backend = _backend(facts, arrays, verify)
    rest: dict[str, Any] = {**numbers, **{name: frozenset(ids) for name, ids in sets.items()}}
    loaded = Loaded(backend=backend, add_bos=bool(facts["add_bos"]), chat_template=template, **rest)
    tokenizer = Tokenizer(loaded, merges)
    if facts["frame"] is not None:
        tokenizer.frame = Frame.from_list(facts["frame"])
        known = tokenizer.added_tokens.keys()
        if not all(piece in known for piece in (*tokenizer.frame.before, *tokenizer.frame.after) if type(piece) is int):
            raise BadFile("the packed chat frame names tokens that are none", hint=_AGAIN)
    return tokenizer


def _backend(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], verify: Callable[..., None]) -> Any:
    from tokenizers import Tokenizer as Backend

    verify(*arrays)
    if WHOLE in arrays:
        return Backend.from_buffer(arrays[WHOLE].tobytes())
    return _rebuilt(facts["tree"], arrays)


def _split(tree: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Take vocabulary and merges out of a tokenizer's tree; None, and nothing taken, where they do not fit arrays."""
    model = tree["model"]
    vocab, merges = model.get("vocab"), model.get("merges")
    if model.get("type") != "BPE" or not isinstance(vocab, dict) or not isinstance(merges, list):
        return None
    ordered = sorted(vocab, key=vocab.__getitem__)
    if [vocab[text] for text in ordered] != list(range(len(ordered))) or any("\0" in text for text in ordered):
        return None
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if not all(len(pair) == 2 and pair[0] in vocab and pair[1] in vocab for pair in pairs):
        return None
    model["vocab"], model["merges"] = {}, []
    return {
        VOCABULARY: _as_bytes("\0".join(ordered)),
        LEFT: np.array([vocab[left] for left, _ in pairs], np.int32),
        RIGHT: np.array([vocab[right] for _, right in pairs], np.int32),
    }


def _rebuilt(tree: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    given = {name: value for name, value in tree["model"].items() if name not in ("type", "vocab", "merges")}
    settings = {name: value for name, value in given.items() if value is not None}
    with _no_collection():
        tokens = _tokens(arrays)
        halves = [map(tokens.__getitem__, side.tolist()) for side in _halves(arrays)]
        vocab = dict(zip(tokens, range(len(tokens))))
        backend = Backend(models.BPE(vocab=vocab, merges=list(zip(*halves, strict=True)), **settings))
    # The other parts are small: their JSON is read by a tokenizer of no words, and they are taken from it.
    shell = Backend.from_str(json.dumps(tree | {"added_tokens": []}))
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        found = getattr(shell, part)
        if found is not None:
            setattr(backend, part, found)
    for special, run in groupby(tree["added_tokens"], key=lambda token: token["special"]):
        added = [AddedToken(**{key: token[key] for key in token if key != "id"}) for token in run]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _halves(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The ids to the left and to the right of every merge, in the order of their ranks."""
    if LEFT in arrays:
        return arrays[LEFT], arrays[RIGHT]
    pairs = np.empty_like(arrays[PAIRS])
    pairs[arrays[RANKS]] = arrays[PAIRS]
    return pairs >> 32, pairs & 0xFFFFFFFF


def _tokens(arrays: Mapping[str, np.ndarray]) -> list[str]:
    return arrays[VOCABULARY].tobytes().decode("utf-8").split("\0")


@contextmanager
def _no_collection() -> Iterator[None]:
    """A hundred thousand new objects, none of them garbage, would make the collector look through them several times."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _json_of(tree: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """The JSON of the tokenizer made again; empty where it cannot be made."""
    try:
        return str(_rebuilt(tree, arrays).to_str(pretty=False))
    except Exception:  # whatever it is, this tokenizer does not fit the form
        return ""


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
