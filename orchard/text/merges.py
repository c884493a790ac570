"""Byte-level BPE straight from packed arrays: text to ids and back without building a tokenizer.

The `tokenizers` package keeps a vocabulary in hash tables, which take some twenty megabytes and half the time of a start to
fill. Here a vocabulary is a few sorted arrays in the packed file, looked up where they lie, and a start builds nothing. Only
what is certain to come out the same is done here: the pre-tokenizers named in `orchard.text.words`, texts of Western
characters, words of ordinary length. For anything else `encode` says None, and the tokenizer itself is built and asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from orchard.text.spelling import byte_of_character
from orchard.text.words import Splitter, expressions_of

VOCABULARY, STARTS, PAIRS, RANKS, MADE, ORDER = (
    f"tokenizer.{name}" for name in ("vocabulary", "starts", "pairs", "ranks", "made", "order")
)
ARRAYS = (VOCABULARY, STARTS, PAIRS, RANKS, MADE, ORDER)
LONGEST_WORD = 1000
"""Characters. The time for a word grows with the square of its length."""
_NEVER = 2**31 - 1
_PLAIN_MODEL = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
_PLAIN_MODEL |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}


class Added(NamedTuple):
    """An entry that is matched whole in a text; the same facts as `tokenizers.AddedToken`."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class Merges:
    """Encodes and decodes. Holds views of the arrays and nothing that grows."""

    def __init__(self, facts: Mapping[str, Any], added: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """`facts` and `arrays` from `merge_arrays`; `added`: the added tokens as in tokenizer.json. Raises `ValueError` or
        `TypeError` where they do not belong together."""
        letters = facts["letters"]
        if len(letters) != 256 or any(type(token_id) is not int for token_id in letters):
            raise ValueError("no byte-level tokenizer")
        self._split = Splitter(facts["expressions"])
        self._letters = letters
        self._text = arrays[VOCABULARY].data
        self._starts, self._pairs, self._ranks, self._made, self._order = (arrays[name].data for name in ARRAYS[1:])
        self.size = len(self._starts) - 1
        whole = len(self._pairs) == len(self._ranks) == len(self._made)
        if not whole or self._starts[self.size] != len(self._text) + 1:
            raise ValueError("the merges are not whole")
        self.added: dict[int, Added] = {}
        for token in added:
            self.added[token["id"]] = Added(*(token[name] for name in Added._fields))
        # Control tokens are text like any other here; other added tokens are cut out of a text first.
        self._cut_out = tuple(token.content for token in self.added.values() if not token.special)
        self._table = byte_of_character()
        self._characters = {byte: character for character, byte in self._table.items()}

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text in which control tokens are plain text; None where the tokenizer itself has to be asked."""
        words = self._split(text)
        if words is None or any(content in text for content in self._cut_out):
            return None
        known: dict[str, list[int]] = {}
        ids: list[int] = []
        for word in words:
            if word not in known:
                if len(word) > LONGEST_WORD:
                    return None
                letters = [self._letters[byte] for byte in word.encode()]
                if -1 in letters:
                    return None
                whole = self._whole(word)
                known[word] = [whole] if whole is not None else self._merged(letters)
            ids += known[word]
        return ids

    def token_text(self, token_id: int) -> str | None:
        """The entry of an id as the vocabulary spells it."""
        if token_id in self.added:
            return self.added[token_id].content
        if not 0 <= token_id < self.size:
            return None
        return self._entry(token_id).decode()

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """Ids as text; ids without a token are left out, as are special tokens if so wished."""
        out = bytearray()
        for token_id in ids:
            added = self.added.get(token_id)
            text = self.token_text(token_id)
            if text is None or (skip_special and added is not None and added.special):
                continue
            try:
                out += bytes([self._table[character] for character in text])
            except KeyError:  # not spelled in bytes: a control token
                out += text.encode()
        return out.decode("utf-8", "replace")

    def _merged(self, ids: list[int]) -> list[int]:
        """Join the pair of the lowest rank, the first of equals, until no pair can be joined."""
        places = [self._place(left, right) for left, right in pairwise(ids)]
        ranks = [self._ranks[place] if place >= 0 else _NEVER for place in places]
        while ranks and (lowest := min(ranks)) != _NEVER:
            at = ranks.index(lowest)
            ids[at] = self._made[places[at]]
            del ids[at + 1], places[at], ranks[at]
            for pair in (at - 1, at):
                if 0 <= pair < len(ranks):
                    places[pair] = place = self._place(ids[pair], ids[pair + 1])
                    ranks[pair] = self._ranks[place] if place >= 0 else _NEVER
        return ids

    def _entry(self, token_id: int) -> bytes:
        return bytes(self._text[self._starts[token_id] : self._starts[token_id + 1] - 1])

    def _whole(self, word: str) -> int | None:
        """The id of a word that is in the vocabulary as it is, where the tokenizer takes such words without merging."""
        if not len(self._order):
            return None
        wanted = "".join([self._characters[byte] for byte in word.encode()]).encode()
        place = bisect_left(self._order, wanted, key=self._entry)
        found = self._order[place] if place < len(self._order) else None
        return found if found is not None and self._entry(found) == wanted else None

    def _place(self, left: int, right: int) -> int:
        """Where a pair is among the sorted pairs; -1 where it never joins."""
        wanted = left << 32 | right
        place = bisect_left(self._pairs, wanted)
        return place if place < len(self._pairs) and self._pairs[place] == wanted else -1


def merge_arrays(
    tree: Mapping[str, Any], tokens: list[str], merges: list[tuple[int, int]]
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What `Merges` takes beside the vocabulary: facts that JSON can say (the ids of the 256 single bytes, -1 for one without;
    the expressions that cut words), and arrays. None where it would not do.

    `tokens` in the order of their ids; `merges` as pairs of ids in the order of their ranks.
    """
    model = tree["model"]
    if any(model.get(name) != value for name, value in _PLAIN_MODEL.items()):
        return None
    if tree.get("truncation") or tree.get("padding") or (tree.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    expressions = expressions_of(tree["normalizer"], tree["pre_tokenizer"])
    if expressions is None or len(set(merges)) != len(merges):
        return None
    id_of = {text: token_id for token_id, text in enumerate(tokens)}
    for token in tree["added_tokens"]:
        at_its_place = tokens[token["id"]] == token["content"] if token["id"] < len(tokens) else True
        if not token["content"] or not at_its_place:
            return None
    characters = {byte: character for character, byte in byte_of_character().items()}
    letters = [id_of.get(characters[byte], -1) for byte in range(256)]
    made = [id_of.get(tokens[left] + tokens[right], -1) for left, right in merges]
    if min(made, default=0) < 0:
        return None
    pairs = np.array([left << 32 | right for left, right in merges], np.int64)
    order = np.argsort(pairs)
    entries = [text.encode() for text in tokens]
    by_text = sorted(range(len(tokens)), key=entries.__getitem__) if model.get("ignore_merges") else []
    return {"letters": letters, "expressions": expressions}, {
        STARTS: np.cumsum([0, *(len(entry) + 1 for entry in entries)]).astype(np.int32),
        PAIRS: pairs[order],
        RANKS: order.astype(np.int32),
        MADE: np.array(made, np.int32)[order],
        ORDER: np.array(by_text, np.int32),
    }
